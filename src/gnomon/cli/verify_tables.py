"""The tables of `gnomon verify`: laws, and prompts of two sides.

In:  a Report or a ComparisonReport.
Out: text on stdout.
Not here: what was found (gnomon.verify), the command (verify.py).
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from gnomon.verify.comparison import ComparisonReport
from gnomon.verify.result import MAX_SHOWN, LawResult, Verdict
from gnomon.verify.run import Report


def print_laws(report: Report) -> None:
    """Law by law: cases, the worst difference, ties, the verdict; then what needs more words."""
    console = Console()
    table = Table(title=f"laws of {report.model}", title_justify="left", title_style="bold")
    table.add_column("law", overflow="fold")
    for name in ("cases", "worst difference", "ties"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for result in report.results:
        table.add_row(
            result.sentence, str(result.cases), _worst(result), _ties(result), str(result.verdict)
        )
    console.print(table, markup=False)
    for condition in report.conditions:
        console.print(condition, highlight=False, markup=False)
    for result in report.results:
        _print_remarks(console, result)
    verdict = report.as_json()["verdict"]
    console.print(f"{verdict}: {report.seconds:.0f} s", highlight=False, markup=False)


def print_comparison(report: ComparisonReport) -> None:
    """Prompt by prompt: equal, a tie, or the first difference with its margin."""
    console = Console()
    title = f"{report.model}: {report.sides[0]} = {report.sides[1]}"
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in ("prompt", "tokens", "rows", "worst"):
        table.add_column(name, justify="right")
    table.add_column("outcome")
    for name in ("at", "margin"):
        table.add_column(name, justify="right")
    for one in report.results:
        table.add_row(
            str(one.number),
            str(one.num_prompt),
            str(one.num_compared),
            f"{one.worst:.2g}",
            str(one.outcome),
            "" if one.position is None else str(one.position),
            "" if one.margin is None else f"{one.margin:.2g}",
        )
    console.print(table, markup=False)
    for line in (*report.conditions, f"allowed difference: {report.tolerance:.3g}"):
        console.print(line, highlight=False, markup=False)
    for failure in report.failures[:MAX_SHOWN]:
        console.print(f"FAILED: {failure}", highlight=False, markup=False)
    if len(report.failures) > MAX_SHOWN:
        hidden = len(report.failures) - MAX_SHOWN
        console.print(f"and {hidden} failures more", highlight=False, markup=False)
    verdict = report.as_json()["verdict"]
    console.print(f"{verdict}: {report.seconds:.0f} s", highlight=False, markup=False)


def _print_remarks(console: Console, result: LawResult) -> None:
    """What the table has no room for: rounds, conditions, failures."""
    rounds = f"{result.rounds} rounds" if result.rounds > 1 else ""
    is_absent = result.verdict is Verdict.NOT_APPLICABLE
    detail = f"not applicable: {result.detail}" if is_absent else result.detail
    if rounds or detail:
        text = "; ".join(part for part in (rounds, detail) if part)
        console.print(f"{result.law}: {text}", highlight=False, markup=False)
    for failure in result.failures:
        console.print(f"{result.law} FAILED: {failure}", highlight=False, markup=False)
    hidden = result.num_failures - len(result.failures)
    if hidden > 0:
        console.print(f"{result.law}: and {hidden} failures more", highlight=False, markup=False)


def _worst(result: LawResult) -> str:
    return f"{result.worst:.2g} {result.unit}" if result.unit and result.cases else ""


def _ties(result: LawResult) -> str:
    """Cases whose tokens were a tie; and of the choices, if any was."""
    if not result.choice_ties:
        return str(result.ties)
    return f"{result.ties} ({result.choice_ties} of {result.choices} choices)"
