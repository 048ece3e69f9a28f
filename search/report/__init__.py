"""What a person sees of a search: the plan, its progress, and at the end a summary, a table and pictures."""

from search.report.pages import duration, plan, summary, to_beat, verdict, write
from search.report.progress import progress

__all__ = ["duration", "plan", "progress", "summary", "to_beat", "verdict", "write"]
