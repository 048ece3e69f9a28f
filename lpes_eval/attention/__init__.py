"""Where a model looks while it answers: the command ``lpes-eval attention``, and what it computes."""
