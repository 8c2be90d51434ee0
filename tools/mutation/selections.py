"""Which tests look at which module: the selection that a generated mutant has to fall to.

In:  nothing. Out: `SELECTIONS`, pytest files by module, the likeliest first; each selection takes
far less than a minute of CPU (trial.py measures it on the unchanged source, and refuses more).
"""

from __future__ import annotations

UNIT = "tests/unit/attention/"
GEOMETRY = UNIT + "test_geometry.py"
TRANSFORMS = UNIT + "test_transforms.py"
SHARDING = UNIT + "test_sharding.py"
DRAFTS = UNIT + "test_drafts.py"
INDICES = UNIT + "test_indices.py"
PLAN = UNIT + "test_plan.py"
PLACES = UNIT + "test_plan_places.py"
AXES = UNIT + "test_axes.py"
COSTS = UNIT + "test_route_costs.py"
ROUTES = UNIT + "test_routes.py"
SEQUENCE = UNIT + "test_sequence.py"
ROW_TENSOR = UNIT + "test_row_tensor.py"
UNITS = "tests/laws/bugs/test_bugs_d_units.py"
ROWS = "tests/laws/bugs/test_bugs_a_rows.py"
SENTINELS = "tests/laws/bugs/test_bugs_b_sentinels.py"

_LAYOUTS = tuple(
    f"tests/unit/layouts/test_{name}.py"
    for name in ("float8", "bytes", "edges", "refusals", "registry", "rows", "pools")
)
_PAGES = (
    "tests/unit/cache/test_pages_refusals.py",
    "tests/unit/cache/test_pages.py",
    "tests/unit/cache/test_prefix.py",
    "tests/unit/engine/test_scheduler_prefix.py",
    "tests/unit/engine/test_scheduler_endings.py",
    "tests/unit/engine/test_scheduler_laws.py",
)
_BY_NAME = {
    "geometry": (GEOMETRY, AXES, DRAFTS, INDICES, SEQUENCE, UNITS),
    "geometry_check": (GEOMETRY, TRANSFORMS),
    "axes": (GEOMETRY, AXES, PLACES, SHARDING, TRANSFORMS, DRAFTS, ROW_TENSOR),
    "transforms": (TRANSFORMS, SHARDING, ROWS),
    "sharding": (AXES, SHARDING, TRANSFORMS),
    "drafts": (DRAFTS, ROWS),
    "row_tensor": (ROW_TENSOR, TRANSFORMS),
    "ownership": (SEQUENCE, INDICES, GEOMETRY),
    "indices": (AXES, INDICES, SENTINELS),
    "routes": (ROUTES, COSTS, PLAN),
    "plan": (PLACES, PLAN, ROUTES),
    "plan_limits": (PLACES, PLAN),
    "score_chunks": (PLACES, PLAN),
    "context_chunks": (PLACES, PLAN),
}
_LAYOUT_MODULES = (
    "base", "float8", "fp8_ds_mla_656", "index_k_132", "operations", "plain", "pool", "registry",
    "rows",
)  # fmt: skip

SELECTIONS: dict[str, tuple[str, ...]] = (
    {f"src/gnomon/attention/{name}.py": tests for name, tests in _BY_NAME.items()}
    | {f"src/gnomon/attention/layouts/{name}.py": _LAYOUTS for name in _LAYOUT_MODULES}
    | {f"src/gnomon/cache/{name}.py": _PAGES for name in ("pages", "prefix")}
)
