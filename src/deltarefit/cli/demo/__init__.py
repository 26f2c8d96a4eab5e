"""``deltarefit demo``: a model in training refits real rollout engines, and every bit is checked.

The parent (``run.py``) starts trainer ranks, rollout engines and an oracle as processes of their own and passes prompts and
completions between them (``wire.py``). Weights never pass through the parent: they go from the trainers' Publisher to the
engines' Receivers through the run directory, as in a real deployment.
"""

from __future__ import annotations

__all__: list[str] = []
