"""Names of what is inside arguments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compilecache.arguments import leaves, rebuild

LEAVES = st.none() | st.booleans() | st.integers() | st.text()
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=3)
    ),
)
ARGUMENTS = st.dictionaries(st.from_regex(r"[a-z_]\w{0,5}", fullmatch=True), VALUES, max_size=4)


@given(ARGUMENTS)
def test_rebuild_puts_together_what_leaves_took_apart(arguments: dict[str, object]) -> None:
    """Lists stay lists, tuples tuples and dictionaries dictionaries, empty ones too."""
    flat = dict(leaf for name, value in arguments.items() for leaf in leaves(name, value))
    assert rebuild(flat) == arguments
    assert repr(rebuild(flat)) == repr(arguments)


def test_the_name_tells_the_container() -> None:
    """As it stands in a plan file."""
    value = {"h": [1, (2,)], "é": ()}
    assert dict(leaves("x", value)) == {
        'x["h"][0]': 1,
        'x["h"][1](0)': 2,
        'x["\\u00e9"]()': None,
    }


@pytest.mark.parametrize(
    "flat",
    [{"[0]": 1}, {"x[a]": 1}, {"x[1]": 1}, {"x[0]": 1, "x(0)": 1}, {"x": 1, "x[0]": 1}, {"x[0": 1}],
)
def test_names_that_fit_nothing_are_refused(flat: dict[str, object]) -> None:
    """A plan file is edited by hand: a gap, two kinds or a slip is a ValueError."""
    with pytest.raises(ValueError, match=r"nam|cannot be read"):
        rebuild(flat)
