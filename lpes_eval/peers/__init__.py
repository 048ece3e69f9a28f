"""The methods that layer factors are compared with, inside a transformers model; ``models/`` has their model types."""
