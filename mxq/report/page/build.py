"""From recorded runs to a report: a part for each, with its verdict first."""

from collections.abc import Sequence

from mxq import __version__
from mxq.analysis.summary import Summary
from mxq.evaluate import Run
from mxq.report.page.acceptance import acceptance_section, conditional_section, survival_section
from mxq.report.page.analysed import Analysed, as_written
from mxq.report.page.choice import deploy_section, published_section
from mxq.report.page.content import Page, Part, Section, Verdict
from mxq.report.page.conversion import conversion_section
from mxq.report.page.provenance import checks_section, provenance_section
from mxq.report.page.quality import quality_section
from mxq.report.page.speed import latency_section, speed_sections
from mxq.report.page.verdict import changes_section, verdict_of
from mxq.report.page.why import why_section


def build(analysed: Sequence[Analysed], title: str | None = None) -> Page:
    """Return the report of runs; raises MxqError where one does not say how it was made, or is damaged."""
    parts = []
    for number, one in enumerate(analysed, start=1):
        with as_written(one.run):
            parts.append(_part(f"run{number}", one))
    names = ", ".join(dict.fromkeys(part.title for part in parts))
    return Page(title or f"Speculative decoding of {names}", tuple(parts), f"Made by mxq {__version__}.")


def _part(key: str, one: Analysed) -> Part:
    summary, known, compared = one.summary, one.intervals, one.comparison
    sections = (
        Section("warnings", "Warnings", warnings=summary.warnings),
        *([changes_section(compared)] if compared else []),
        *([deploy_section(one.choices, one.resampling.confidence)] if one.choices else []),
        acceptance_section(summary, known),
        published_section(one.published, one.resampling.confidence),
        *speed_sections(summary, known),
        survival_section(summary, known),
        conditional_section(summary, known),
        why_section(one.why),
        quality_section(one.quality),
        latency_section(summary),
        conversion_section(one.run),
        checks_section(summary),
        provenance_section(summary),
    )
    verdict = verdict_of(compared) if compared else Verdict("No verdict", "", one.refused or "")
    shown = tuple(section for section in sections if not section.empty)
    return Part(key, _name(one.run), _about(summary), verdict, shown)


def _name(run: Run) -> str:
    """Return the model of a run."""
    targets = run.info["definition"]["targets"]
    return str((targets.get("bf16") or targets["mxfp4"])["spec"])


def _about(summary: Summary) -> str:
    """Return what was compared, where, in a line."""
    definition = summary.run.info["definition"]
    targets = " against ".join(f"{name} ({definition['targets'][name]['spec']})" for name in summary.targets)
    prompts = sum(used for used, _ in summary.prompts.values())
    where = f"{definition['engine']}, {definition['dtype']} on {definition['device']}"
    return f"{targets}; {where}; {len(summary.workloads)} workloads, {prompts} prompts; run {summary.run.name}."
