"""SQuAD's normalisation of answers (Rajpurkar et al. 2016, arXiv 1606.05250), of which three benchmarks have a variant.

``re`` and ``regex`` see the end of a word differently; each benchmark takes the one that its own code takes.
"""

import re
import string

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def bare(text: str, article: re.Pattern[str] = re.compile(r"\b(a|an|the)\b")) -> str:
    """``text`` without ASCII punctuation and articles, its white space made single. It is not lower-cased."""
    return " ".join(article.sub(" ", text.translate(_NO_PUNCTUATION)).split())
