"""Generated mutants that no test can see, each with the reason; looked at by hand.

In:  nothing. Out: `EQUIVALENTS`, reasons by (path, the stripped line, before, after). A mutant that
tests catch all the same is reported as caught; the list is asked about survivors only.
"""

from __future__ import annotations

ATTENTION = "src/gnomon/attention/"
LAYOUTS = ATTENTION + "layouts/"

EQUIVALENTS: dict[tuple[str, str, str, str], str] = {
    (
        ATTENTION + "geometry.py",
        "flat = request.long().clamp_min(0) * num_pages + column.clamp(0, num_pages - 1)",
        "-", "+",
    ): "only columns below num_pages are held, and the flat index is clamped to the table below",
    (
        ATTENTION + "axes.py",
        "joins = (request[1:] == request[:-1]) & ((step > 0) | (request[1:] < 0))",
        ">", ">=",
    ): "two rows of one request never stand at one position (I10), so no step of a request is 0",
    (
        ATTENTION + "axes.py",
        "spans = spans_of(np.where(is_row, request[at], -1), np.where(is_row, position[at], 0))",
        "1", "(2)",
    ): "spans_of asks only whether a row's request is below 0; padding yields no span",
    (
        ATTENTION + "drafts.py",
        "position=take_rows(axis.position, index, 0) + shift,",
        "0", "(-1)",
    ): "the fill is for source -1, and every row of the expanded axis has a source",
    (
        ATTENTION + "score_chunks.py",
        "low, high = 0, stop - start",
        "0", "(-1)",
    ): "0 and -1 rows that fit are alike below the fewest rows: the caller then cuts the keys",
    (
        ATTENTION + "geometry_check.py",
        "key = torch.where(is_live, (request << 32) + position, -1 - torch.arange(len(request)))",
        "32", "(33)",
    ): "any shift above the bits of a position keeps (request, position) apart",
    (
        LAYOUTS + "index_k_132.py",
        "if self.head_dim < 4 or self.head_dim % 4:",
        "4", "(3)",
    ): "3, the only width between, is no multiple of 4 and refused by the second half",
}  # fmt: skip
