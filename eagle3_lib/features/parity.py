"""Do two backends give the same features? Asked of a few samples before a long extraction.

An engine that hands over another boundary than the one asked for raises no error: the drafter is trained on it and then
served on something else. So each boundary of one backend is held against all boundaries of the reference.
"""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ..errors import Eagle3Error

RELATIVE_ERROR = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}  # most that rounding makes, by the weights' type
LEAST_COSINE = 0.99


@dataclass(frozen=True)
class Agreement:
    """One boundary of a backend beside the reference's.

    max_error: largest absolute difference; relative_error: norm of the difference over the reference's norm; cosine: the
    smallest of a token; nearest: the reference's boundary that is most like it.
    """

    boundary: int
    max_error: float
    relative_error: float
    cosine: float
    nearest: int
    agrees: bool


def compare(
    found: dict[int, Tensor], reference: dict[int, Tensor], dtype: str, relative_error: float = 0.0
) -> list[Agreement]:
    """Each boundary of one backend beside a reference's.

    Args:
        found: {boundary: [tokens, Ht]} of the backend.
        reference: the same of the reference, for every boundary of the target, so that a shift can be recognised.
        dtype: of the target's weights; it decides how much difference rounding makes.
        relative_error: the threshold; 0 takes that of the dtype.
    """
    limit, rows = relative_error or RELATIVE_ERROR[dtype], []
    for boundary, values in found.items():
        values = values.float().cpu()
        errors = {k: _relative(values, other.float().cpu()) for k, other in reference.items()}
        same = reference[boundary].float().cpu()
        cosine = torch.nn.functional.cosine_similarity(values, same, dim=-1).min().item()
        agrees = errors[boundary] <= limit and cosine >= LEAST_COSINE
        largest = (values - same).abs().max().item()
        rows.append(
            Agreement(boundary, largest, errors[boundary], cosine, min(errors, key=lambda k: errors[k]), agrees)
        )
    return rows


def _relative(values: Tensor, reference: Tensor) -> float:
    return ((values - reference).norm() / reference.norm().clamp(min=1e-30)).item()


def demand(rows: list[Agreement], name: str, reference: str) -> dict:
    """Refuse backends that differ, naming each boundary and, where it is another boundary's, which.

    Returns:
        {"backend", "reference", "boundaries": rows}, for the manifest.
    Raises:
        Eagle3Error
    """
    wrong = [row for row in rows if not row.agrees]
    if wrong:
        shifts = {row.nearest - row.boundary for row in wrong if row.nearest != row.boundary}
        shift = f"\nAll are off by {shifts.pop():+d}." if len(shifts) == 1 and len(wrong) == len(rows) else ""
        said = "\n".join(_explain(row, name, reference) for row in wrong)
        raise Eagle3Error(f"parity: {name} and {reference} give different features.\n{said}{shift}")
    return {"backend": name, "reference": reference, "boundaries": [asdict(row) for row in rows]}


def _explain(row: Agreement, name: str, reference: str) -> str:
    figures = f"relative error {row.relative_error:.2g}, max error {row.max_error:.3g}, cosine {row.cosine:.3f}"
    if row.nearest == row.boundary:
        return f"  boundary {row.boundary}: {figures}; it is like no other boundary either"
    by = row.nearest - row.boundary
    kind = "off by one" if abs(by) == 1 else f"off by {abs(by)}"
    return f"  boundary {row.boundary}: {figures}; {name} holds there what {reference} has at boundary {row.nearest}: {kind}"
