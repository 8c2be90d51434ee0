"""Generated mutants that no test can see, each with the reason; looked at by hand.

In:  nothing. Out: `EQUIVALENTS`, reasons by (path, the stripped line, before, after). A mutant that
tests catch all the same is reported as caught; the list is asked about survivors only.
"""

from __future__ import annotations

EQUIVALENTS: dict[tuple[str, str, str, str], str] = {}
