"""What a person sees of a search: the plan, its progress, and at the end a summary, a table and pictures."""
