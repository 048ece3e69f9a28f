"""How lm-evaluation-harness meets this package: model types and tasks, what fits a model, and the tasks' base class."""
