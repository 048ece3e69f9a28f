"""Where examples come from: generated or official files, and their splits."""
