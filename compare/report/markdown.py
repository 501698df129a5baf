"""The report in Markdown; ``python -m compare.report.markdown RESULTS.json`` prints only its tables."""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from backends.registry import REFERENCE
from compare.numbers import longer, one_line, part_of_step, percent, rate
from compare.report.first_screen import first_screen
from compare.report.headings import differences, leaves
from compare.report.lost_speed import where_speed_is_lost_elsewhere
from compare.report.memory import memory_table
from compare.report.page import Block, Lines, Section, Table, Text
from compare.report.sections import beside_the_ranking, details, look_of
from compare.report.tables import COVERED, CPU_TIME, NO_COMMUNICATION
from compare.report.words import metric_heading
from compare.results import Curve, Entrant, GroupResult, Interval, Results, read_results
from compare.steps import parts_in

_MIB = 2**20
_HEADINGS = (
    *("ranks", "precision", "batch = ranks x micro x accumulation", "backend", "in lockstep", "samples/s [95 %]"),
    *("step, median / p95 (ms)", CPU_TIME, "first step (s)", "memory (MiB)", "step longer than the opponent's"),
)
_STATES = {"good": "✓", "bad": "✗", "open": "?"}


def render_markdown(results: Results) -> str:
    """Renders the report as a comment on a pull request: the first screen, and below it folded details."""
    screen = first_screen(results, look_of(results))
    grounds = [f"{_STATES[ground.state]} {ground.question}: {ground.answer}" for ground in screen.grounds]
    parts = [
        f"# {escape(results.title)}",
        *(f"> **Warning.** {escape(sentence)}" for sentence in screen.warnings),
        *(f"**{escape(sentence)}**" for sentence in screen.verdict[:1]),
        escape(" ".join(screen.verdict[1:])),
        _list(grounds),
        *(_shown(table) for table in screen.tables[:1]),
        escape(screen.lost),
        *(_shown(table) for table in screen.tables[1:]),
        *(_section(section) for section in beside_the_ranking(results)),
        escape(screen.about),
        *(_folded(heading, text) for heading, text in _details(results).items() if text),
        f"Made {results.created_at}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _details(results: Results) -> dict[str, str]:
    commands = [f"{escape(name)}:\n\n    {one_line(command)}" for name, command in results.commands.items()]
    sections = {section.id: section for section in details(results, look_of(results))}
    told = ("lockstep", "pairs", "settings", "problems", "environment")
    return {
        "Throughput": results_table(results),
        "Where the time of a step goes": breakdown_table(results),
        "Where speed is lost under other conditions": _list(where_speed_is_lost_elsewhere(results)),
        "What the tensors of a rank hold": "\n\n".join(
            _shown(table) for table in map(memory_table, results.groups) if table.rows
        ),
        "Trained to the end": seed_table(results),
        "Time to an accuracy": _list(_time_to_target(curve) for curve in results.curves if curve.target is not None),
        **{sections[id].heading: _blocks(sections[id].blocks) for id in told if id in sections},
        "Commands": "\n\n".join(commands),
    }


def _section(section: Section) -> str:
    """Returns a section that is not folded, with its parts."""
    parts = [f"### {escape(part.heading)}\n\n{_blocks(part.blocks)}" for part in section.sections]
    return "\n\n".join([f"## {section.heading}", *filter(None, [_blocks(section.blocks)]), *parts])


def _folded(heading: str, text: str) -> str:
    return f"<details><summary>{heading}</summary>\n\n{text}\n\n</details>"


def _blocks(blocks: Iterable[Block]) -> str:
    """Returns the text, the lists and the tables of a section; Markdown has no figures."""
    texts = []
    for block in blocks:
        if isinstance(block, Text):
            texts.append(escape(block.text))
        elif isinstance(block, Lines):
            texts.append(_list(block.items))
        elif isinstance(block, Table):
            texts.append(_shown(block))
    return "\n\n".join(texts)


def _shown(table: Table) -> str:
    rows = [[cell.text for cell in row.cells] for row in table.rows]
    return f"{escape(table.caption)}:\n\n{_table([*map(escape, table.columns)], rows)}"


def headline_table(results: Results) -> str:
    """Returns what is reached with the most ranks and by one process, without accumulation."""
    plain = {one.group.key for one in results.groups if one.group.gradient_accumulation_steps == 1}
    rows = [
        [
            standing.conditions,
            one.label,
            _interval(one.samples_per_second),
            "" if one.claim is None else longer(one.longer),
        ]
        for standing in results.standings
        if standing.placings[0].group in plain
        for one in standing.placings
        if one in standing.rivals or one.name == REFERENCE
    ]
    return _table(("conditions", "entrant", "samples/s [95 %]", "a step takes longer by [95 %]"), rows) if rows else ""


def results_table(results: Results) -> str:
    """Returns a row for each entrant, group by group."""
    against: dict[tuple[str, str], str] = {}
    for standing in results.standings:
        for one in [*standing.placings, *standing.approximations, *standing.limits]:
            seen = "is the opponent" if one.claim is None else longer(one.longer)
            again = (one.group, one.name) in against  # one process, beside the ranks of several networks
            against[one.group, one.name] = "differs by network" if again else seen
    each = [(group, entrant) for group in results.groups for entrant in group.entrants]
    headings: tuple[str, ...] = _HEADINGS
    rows = [_row(*one, against.get((one[0].group.key, one[1].name), "not ranked")) for one in each]
    seen_as = [
        (group.group.conditions.get("network"), group.group.machine, *row[:4])
        for (group, _), row in zip(each, rows, strict=True)
    ]
    places: dict[str, list[str | None]] = {
        "told apart by": [*differences(seen_as, [dict(leaves(group.group.conditions)) for group, _ in each])],
        "network": [group.group.conditions.get("network") for group, _ in each],
        "machine": [group.group.machine for group, _ in each],
    }
    for heading, named in places.items():
        if any(named):
            headings = (heading, *headings)
            rows = [[place or "-", *row] for place, row in zip(named, rows, strict=True)]
    return _table(*_without_unknown(CPU_TIME, headings, rows))


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
    entrants = [one for group in results.groups for one in group.entrants]
    shown = parts_in(one.breakdown for one in entrants if one.breakdown)
    rows = []
    for group in results.groups:
        for entrant in group.entrants:
            if (parts := entrant.breakdown) is not None:
                cells = [part_of_step(parts, part, 3) for part in shown]
                sent = "-"
                if (wire := entrant.wire) is not None:
                    sent = f"{wire.bytes_per_step / _MIB:.2f} / {wire.ring_bound / _MIB:.2f} on {wire.interface}"
                overhead = "-" if parts.overhead is None else f"{parts.overhead:+.0%}"
                covered = "-" if parts.covered is None else percent(parts.covered)
                times = [_milliseconds(parts.total), covered, overhead]
                rows.append([group.group.key, entrant.name, *cells, *times, sent])
    headings = ("conditions", "backend", *(f"{part} (ms)" for part in shown[:1]), *shown[1:])
    sums = ("sum", COVERED, "diagnosed step longer than timed", "sent by a rank / needed at least (MiB)")
    return _table(*_without_unknown(COVERED, (*headings, *sums), rows)) if rows else ""


def _without_unknown(
    heading: str, headings: tuple[str, ...], rows: list[list[str]]
) -> tuple[tuple[str, ...], list[list[str]]]:
    """Leaves out a column that has no figure, as in older results."""
    column = headings.index(heading)
    if any(row[column] not in ("", "-") for row in rows):
        return headings, rows
    return headings[:column] + headings[column + 1 :], [row[:column] + row[column + 1 :] for row in rows]


def escape(text: str) -> str:
    """Returns a text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#~&])", r"\\\1", one_line(text))


def _row(group: GroupResult, entrant: Entrant, against: str) -> list[str]:
    conditions = group.group
    split = f"{conditions.num_processes} x {conditions.micro_batch_size} x {conditions.gradient_accumulation_steps}"
    cells = [str(conditions.num_processes), conditions.precision, f"{conditions.global_batch_size} = {split}"]
    if not entrant.num_runs:
        why = entrant.failures[0] if entrant.failures else "it has no run"
        return [*cells, entrant.name, f"failed: {why}", *[""] * (len(_HEADINGS) - 5)]
    steps = f"{_milliseconds(entrant.median_step_seconds)} / {_milliseconds(entrant.p95_step_seconds)}"
    starts = entrant.seconds_to_first_step
    memory = entrant.peak_cuda_memory_bytes or entrant.peak_memory_bytes
    return [
        *cells,
        entrant.name,
        NO_COMMUNICATION if entrant.role == "limit" else entrant.parity.verdict,
        _interval(entrant.samples_per_second),
        steps,
        _milliseconds(entrant.mean_step_cpu_seconds),
        f"{statistics.median(starts):.1f}" if starts else "-",
        f"{memory / _MIB:.0f}" if memory else "-",
        against,
    ]


def _time_to_target(curve: Curve) -> str:
    who = f"{curve.backend}, {curve.group}: accuracy {curve.target:g}"
    if curve.seconds_to_target is None:
        return f"{who} not reached in {curve.seconds[-1]:.1f} s of training"
    return f"{who} after {curve.seconds_to_target:.1f} s of training, at the first evaluation that reached it"


def _interval(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    bounds = (
        f" [{rate(interval.low)}, {rate(interval.high)}]"
        if interval.low is not None and interval.high is not None
        else ""
    )
    return f"{rate(interval.estimate)}{bounds}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


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
