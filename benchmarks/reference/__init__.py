"""How the reference models were trained: tokenizer, examples, training, and the evaluation that chose the recipe."""
