"""Decides, before anything is sent, how each tensor travels and who may take part. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deltarefit.canonical import Catalog, TensorDigest, digest_of_digests
from deltarefit.plan import RefitPlan
from deltarefit.receiver import PrewarmReport
from deltarefit.records import Encoding
from deltarefit.runtime.messages import EngineSummary, Holding

__all__ = ["DigestCheck", "check_digests", "check_holding", "make_plan", "summarise"]

_ALL = tuple(int(encoding) for encoding in Encoding)


def summarise(reports: Sequence[PrewarmReport], catalog: Catalog) -> EngineSummary:
    """Join what prewarm found on the ranks of one engine."""
    encodings: dict[str, tuple[int, ...]] = {}
    skipped: list[str] = []
    dense: list[str] = []
    computed: list[str] = []
    for name in catalog:
        holding = [report.routes[name] for report in reports if report.routes[name].kind != "skipped"]
        if not holding and catalog[name].num_elements:
            skipped.append(name)
        if any(route.is_dense for route in holding):
            dense.append(name)
        if any(route.kind == "scratch" for route in holding):
            computed.append(name)
        encodings[name] = tuple(code for code in _ALL if all(code in route.encodings for route in holding))
    return EngineSummary(encodings, tuple(skipped), tuple(dense), tuple(computed))


def make_plan(
    catalog: Catalog,
    summaries: Iterable[EngineSummary],
    *,
    preferred: Encoding,
    num_owners: int,
    dense: frozenset[str],
) -> RefitPlan:
    """The best encoding of each tensor that every receiver can take: the preferred one, else xor, else overwrite."""
    given = list(summaries)
    order = [encoding for encoding in (preferred, Encoding.XOR) if not encoding.is_repeatable]
    if preferred is Encoding.OVERWRITE:
        order = []
    encodings = {}
    for name in catalog:
        takeable = (e for e in order if all(int(e) in summary.encodings.get(name, ()) for summary in given))
        encodings[name] = next(takeable, Encoding.OVERWRITE)
    return RefitPlan(catalog, encodings, num_owners, dense.union(*(summary.dense for summary in given)))


@dataclass(frozen=True, slots=True)
class DigestCheck:
    """How a receiver's resident bits compare with the policy that they should be."""

    differing: tuple[str, ...]
    """Tensors whose digest differs, in name order."""
    unproven: tuple[str, ...]
    """Tensors that the receiver holds but cannot prove."""

    @property
    def is_equal(self) -> bool:
        return not self.differing

    def describe(self, catalog: Catalog) -> str:
        """The first differing tensors, in words."""
        first = ", ".join(str(catalog[name]) for name in self.differing[:3])
        return f"{len(self.differing)} of {len(catalog)} tensors differ, first {first}"


def check_holding(
    expected: Mapping[str, TensorDigest], holding: Holding, skipped: Iterable[str], known: dict[tuple[str, ...], str]
) -> DigestCheck | None:
    """``check_digests`` from a summary; None if something differs, which a list has to name.

    ``known`` keeps the summary of what is expected without each set of unproven tensors: most receivers have the same set.
    """
    unproven = set(holding.unproven)
    if (summary := known.get(holding.unproven)) is None:
        summary = digest_of_digests({name: digest for name, digest in expected.items() if name not in unproven})
        known[holding.unproven] = summary
    if summary != holding.summary:
        return None
    return DigestCheck((), tuple(sorted(unproven.intersection(expected).difference(skipped))))


def check_digests(expected: Mapping[str, TensorDigest], shown: Mapping[str, str | None], skipped: Iterable[str]) -> DigestCheck:
    """Compare digests that a receiver computed with the source's. Tensors that its engine skips do not count."""
    leave_out = set(skipped)
    differing: list[str] = []
    unproven: list[str] = []
    for name in sorted(expected):
        if name in leave_out:
            continue
        text = shown.get(name)
        if text is None:
            unproven.append(name)
        elif text != expected[name].hex():
            differing.append(name)
    return DigestCheck(tuple(differing), tuple(unproven))
