"""Published pages: nothing of this machine, figures with alternative text, colours of the page."""

import matplotlib.pyplot as plt
import pytest

from eagle3_lib import plots, publish
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.provenance import ROOT


def test_a_page_that_shows_a_folder_of_this_machine_is_refused():
    with pytest.raises(Eagle3Error, match="reports/x/index.html: shows a folder of this machine: .*secret"):
        publish.refuse_leaks(f"<p>{ROOT}/secret</p>", "x/index.html")
    publish.refuse_leaks(f"<p>{ROOT}ish is another word</p>", "x/index.html")


def test_a_figure_carries_its_text_data_and_the_pages_colour(tmp_path):
    figure, axes = plt.subplots()
    axes.plot([1, 2], [3, 4])
    axes.set_title("title & more")
    shown = plots.show(
        figure, "A <caption>.", 'Rises from 3 to 4 "fast".', tmp_path / "figures" / "f", [{"x": 1, "y": 3}]
    )
    page = shown._repr_html_()
    assert 'aria-label="Rises from 3 to 4 &quot;fast&quot;."' in page and "A &lt;caption&gt;." in page
    assert "currentColor" in page and plots.PAGE_TEXT not in page
    assert 'href="figures/f.pdf"' in page and 'href="figures/f.csv"' in page
    assert (tmp_path / "figures" / "f.csv").read_text() == "x,y\n1,3\n"
    assert plots.PAGE_TEXT in (tmp_path / "figures" / "f.svg").read_text()


def test_error_bars_reach_from_low_to_high():
    assert plots._errors({"value": [0.5, 0.2], "low": [0.4, 0.2], "high": [0.7, 0.3]}) == [
        pytest.approx([0.1, 0.0]),
        pytest.approx([0.2, 0.1]),
    ]
