"""Points and lines over two axes."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from megatron_ext.view.plot import Series, plot

SVG = "{http://www.w3.org/2000/svg}"


def test_points_of_one_x_stand_on_one_line_inside_the_axes():
    root = ElementTree.fromstring(plot("one", "x", "y", [Series("s", ((4, 1), (4, 3)))]))
    dots = list(root.iter(f"{SVG}circle"))[:2]
    (x,) = {float(dot.get("cx")) for dot in dots}
    low, high = (float(dot.get("cy")) for dot in dots)
    assert 64 <= x <= 624 and 48 <= high < low <= 428
