"""The report in Markdown; ``python -m compare.report.markdown RESULTS.json`` prints only its tables."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from backends.registry import REFERENCE
from compare.numbers import one_line, part_of_step
from compare.report.bare import adapter_cost_lines
from compare.report.gate_table import GATE_HEADINGS, gate_cells, verdict_of
from compare.report.headline import headlines
from compare.report.peer_tables import ABOUT, HEADING, peer_cells, peer_columns
from compare.report.words import metric_heading
from compare.results import PARTS, Comparison, Curve, Entrant, Group, GroupResult, Interval, Results, read_results

_MIB = 2**20
_HEADINGS = (
    *("ranks", "precision", "batch = ranks x micro x accumulation", "backend", "in lockstep", "samples/s [95 %]"),
    *("step, median / p95 (ms)", "first step (s)", "memory (MiB)", "time against the group's first"),
)
_BREAKDOWN_HEADINGS = (
    *("conditions", "backend", "data (ms)", *PARTS[1:], "sum", "sum against timed steps"),
    "sent by a rank / ring bound (MiB)",
)


def render_markdown(results: Results) -> str:
    """Renders the whole report."""
    where = [
        f"{place.machine}; {place.software}; {place.num_runs} runs" + (f"; {place.idleness}" if place.idleness else "")
        for place in results.places
    ]
    commands = [f"{escape(name)}:\n\n    {one_line(command)}" for name, command in results.commands.items()]
    sections = {
        "": _list(results.verdict),
        "Compared with the baseline": _gate(results),
        "Throughput": results_table(results),
        HEADING: peer_tables(results),
        "Trained to the end": seed_table(results),
        "Time to an accuracy": _list(_time_to_target(curve) for curve in results.curves if curve.target is not None),
        "Where the time of a step goes": breakdown_table(results),
        "Comparisons": _list(f"{group.group.key}: {one.text}" for group, one in _comparisons(results)),
        "Lockstep": _list(
            f"{entrant.name}, {group.group.key}: {entrant.parity.verdict}; {entrant.parity.detail}"
            for group in results.groups
            for entrant in group.entrants
        ),
        "What the adapters cost": _list(adapter_cost_lines(results.adapter_costs)),
        "Problems": _list(results.problems),
        "Machines": _list(where),
        "How the race was run": _list(f"{name}: {value}" for name, value in results.facts.items()),
        "Commands": "\n\n".join(commands),
    }
    parts = [f"# {escape(results.title)}", f"Made {results.created_at}."]
    for heading, text in sections.items():
        if text:
            parts += [f"## {heading}", text] if heading else [text]
    return "\n\n".join(parts) + "\n"


def _gate(results: Results) -> str:
    """Returns whether the race passes beside its baseline; nothing without one."""
    if results.gate is None:
        return ""
    table = _table(GATE_HEADINGS, map(gate_cells, results.gate.rows))
    return f"{_list(verdict_of(results.gate))}\n\n{table}"


def headline_table(results: Results) -> str:
    """Returns what each backend reaches on several ranks beside one process on the same batch, without accumulation."""
    groups: list[Group] = []
    rows = []
    for headline in headlines(results):
        alone = headline.alone
        groups += [alone, *(group for group, _ in headline.rivals)]
        rows.append([alone.precision, REFERENCE, "1", _interval(headline.rate), "1"])
        for group, entrant in headline.rivals:
            speed = entrant.samples_per_second
            against = "-" if speed is None else f"{speed.estimate / headline.rate.estimate:.2f}"
            rows.append([group.precision, entrant.name, str(group.num_processes), _interval(speed), against])
    headings = ("precision", "backend", "ranks", "samples/s [95 %]", "times one process")
    return _table_of_machines(headings, groups, rows) if rows else ""


def results_table(results: Results) -> str:
    """Returns a row for each entrant, group by group."""
    each = [(group, entrant) for group in results.groups for entrant in group.entrants]
    return _table_of_machines(_HEADINGS, [group.group for group, _ in each], [_row(*one) for one in each])


def peer_tables(results: Results) -> str:
    """Returns a table of peers for each set of conditions, with what it is about above it."""
    tables = [
        f"{escape(one.group)}:\n\n{_table([*map(escape, peer_columns(one))], map(peer_cells, one.rows))}"
        for one in results.peers
    ]
    return "\n\n".join([ABOUT, *tables]) if tables else ""


def seed_table(results: Results) -> str:
    """Returns the table of published comparisons: what each backend reaches when it trains to the end."""
    seeds = results.seed_table
    if not seeds:
        return ""
    scores = {
        metric_heading("f1", seeds, shown="F1"): [row.f1 for row in seeds],
        "macro F1": [row.macro_f1 for row in seeds],
        metric_heading("roc_auc", seeds, shown="AUC"): [row.roc_auc for row in seeds],
        "accuracy": [row.accuracy for row in seeds],
    }
    scores = {heading: values for heading, values in scores.items() if any(value is not None for value in values)}
    rows = [
        [
            *(row.hardware, row.backend, f"{row.train_seconds:.1f}"),
            *(_number(values[number], ".4f") for values in scores.values()),
            row.batch_size,
        ]
        for number, row in enumerate(seeds)
    ]
    return _table(("hardware", "backend", "train time (s)", *map(escape, scores), "batch size"), rows)


def breakdown_table(results: Results) -> str:
    """Returns where the time of a step goes, and what a step sends."""
    rows = []
    for group in results.groups:
        for entrant in group.entrants:
            if (parts := entrant.breakdown) is not None:
                cells = [part_of_step(parts, part, 3) for part in PARTS]
                sent = "-"
                if (wire := entrant.wire) is not None:
                    sent = f"{wire.bytes_per_step / _MIB:.2f} / {wire.ring_bound / _MIB:.2f} on {wire.interface}"
                overhead = "-" if parts.overhead is None else f"{parts.overhead:+.0%}"
                rows.append([group.group.key, entrant.name, *cells, _milliseconds(parts.total), overhead, sent])
    return _table(_BREAKDOWN_HEADINGS, rows) if rows else ""


def escape(text: str) -> str:
    """Returns a text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#~&])", r"\\\1", one_line(text))


def _row(group: GroupResult, entrant: Entrant) -> list[str]:
    conditions = group.group
    split = f"{conditions.num_processes} x {conditions.micro_batch_size} x {conditions.gradient_accumulation_steps}"
    cells = [str(conditions.num_processes), conditions.precision, f"{conditions.global_batch_size} = {split}"]
    if not entrant.num_runs:
        why = entrant.failures[0] if entrant.failures else "it has no run"
        return [*cells, entrant.name, f"failed: {why}", *[""] * (len(_HEADINGS) - 5)]
    steps = f"{_milliseconds(entrant.median_step_seconds)} / {_milliseconds(entrant.p95_step_seconds)}"
    starts = sorted(entrant.seconds_to_first_step)
    memory = entrant.peak_cuda_memory_bytes or entrant.peak_memory_bytes
    return [
        *cells,
        entrant.name,
        entrant.parity.verdict,
        _interval(entrant.samples_per_second),
        steps,
        f"{starts[len(starts) // 2]:.1f}" if starts else "-",
        f"{memory / _MIB:.0f}" if memory else "-",
        _against_first(group, entrant),
    ]


def _against_first(group: GroupResult, entrant: Entrant) -> str:
    if not entrant.ranked:
        return "not ranked"
    first = next(other for other in group.entrants if other.ranked)
    for comparison in group.comparisons:
        if (comparison.first, comparison.second) == (first.name, entrant.name):
            return _slowdown(comparison)
    return "-"


def _slowdown(comparison: Comparison) -> str:
    interval = comparison.slowdown
    if interval is None or interval.low is None or interval.high is None:
        return "too few runs"
    bounds = f"[{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"
    shown = "" if comparison.claim in ("slower", "faster") else ", not significant"
    return f"{100 * interval.estimate:+.1f} % {bounds}{shown}"


def _time_to_target(curve: Curve) -> str:
    who = f"{curve.backend}, {curve.group}: accuracy {curve.target:g}"
    if curve.seconds_to_target is None:
        return f"{who} not reached in {curve.seconds[-1]:.1f} s of training"
    return f"{who} after {curve.seconds_to_target:.1f} s of training, at the first evaluation that reached it"


def _comparisons(results: Results) -> Iterable[tuple[GroupResult, Comparison]]:
    return ((group, comparison) for group in results.groups for comparison in group.comparisons)


def _interval(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    bounds = (
        f" [{interval.low:.0f}, {interval.high:.0f}]" if interval.low is not None and interval.high is not None else ""
    )
    return f"{interval.estimate:.0f}{bounds}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _table_of_machines(headings: Sequence[str], groups: Sequence[Group], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table with a row for each group, which names the machine if there are several."""
    if not any(group.machine for group in groups):
        return _table(headings, rows)
    named = [[group.machine or "-", *row] for group, row in zip(groups, rows, strict=True)]
    return _table(("machine", *headings), named)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *([escape(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {escape(line)}" for line in lines)


def main(arguments: list[str]) -> int:
    """Prints the tables of a results.json; returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m compare.report.markdown RESULTS.json", file=sys.stderr)
        return 2
    try:
        results = read_results(Path(arguments[0]))
    except (OSError, ValueError) as error:
        print(
            f"lockstep: {arguments[0]}: is not a valid file of results ({one_line(str(error))[:200]})", file=sys.stderr
        )
        return 2
    tables = (headline_table(results), results_table(results), seed_table(results))
    print("\n\n".join(table for table in tables if table))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
