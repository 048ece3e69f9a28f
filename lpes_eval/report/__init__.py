"""One page, and its figures, from results of lm-eval and the folders of searches."""
