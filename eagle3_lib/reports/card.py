"""The decision card as a notebook and a published page show it (:mod:`eagle3_lib.verdict.card`)."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, Template

from .. import results
from ..params import DiagnoseParams, ReplayParams
from ..paths import project_path, short_path
from ..results import StoredCard
from ..verdict.card import FINE, OF_DRAFTER, OF_ENGINE, Card

TONES = {
    FINE: "fine",
    OF_DRAFTER: "drafter",
    OF_ENGINE: "engine",
}  # how a card is marked, by its exit code; else "untold"


@dataclass(frozen=True)
class ShownCard:
    """A card that is HTML in a notebook and text elsewhere."""

    card: Card

    def _repr_html_(self) -> str:
        return html(self.card)

    def __repr__(self) -> str:
        return self.card.text()


def html(card: Card) -> str:
    """The card as HTML with its own style; nothing is fetched, and every text of it is escaped."""
    tone = TONES.get(card.exit_code, "untold")
    return _template().render(card=card, rows=card.rows(), tone=tone)


@cache
def _template() -> Template:
    return Environment(autoescape=True).from_string(Path(__file__).with_name("card.html.j2").read_text())


def of_run(params: DiagnoseParams) -> list[ShownCard]:
    """The cards that stage 08 wrote for a run, by engine and drafter; one that has none (an earlier version's) is left out.

    Raises:
        Eagle3Error: a card.json is damaged or of another version.
    """
    folder = project_path(params.folder) / "replay"
    places = [folder / engine / name / "card.json" for engine in params.engines for name in params.drafters]
    return [ShownCard(read(place)) for place in places if place.is_file()]


def of_replay(params: ReplayParams) -> ShownCard:
    """The card of one run of stage 08."""
    return ShownCard(read(project_path(params.out) / "card.json"))


def read(path: Path) -> Card:
    """The card that a card.json holds.

    Raises:
        Eagle3Error: there is none, or it is of another version.
    """
    return Card.read(results.check(StoredCard, results.read_json(path), short_path(path), results.CARD_SCHEMA))
