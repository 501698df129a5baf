"""What the interface promises is what the contract checks: each clause quotes its promises, none is left over."""

from __future__ import annotations

import pytest

from contract.check import all_checks
from contract.promises import all_promises, find_promise


@pytest.mark.parametrize("check_id", all_checks())
def test_a_clause_quotes_its_promises(check_id: str) -> None:
    quotes = all_checks()[check_id].promises
    assert quotes
    for quote in quotes:
        assert str(find_promise(quote)).startswith(quote)


def test_every_promise_is_checked() -> None:
    checked = {find_promise(quote) for check in all_checks().values() for quote in check.promises}
    assert set(all_promises()) == checked


def test_promises_are_whole_sentences() -> None:
    for promise in all_promises():
        assert promise.sentence[0].isupper()
        assert promise.sentence.endswith(".")


@pytest.mark.parametrize("quote", ["Backend.step", "Backend.setup: No", "Backend.setup: All ranks win", "Thing: Not"])
def test_a_quote_of_no_promise_or_of_several_is_refused(quote: str) -> None:
    with pytest.raises(LookupError, match="quote one"):
        find_promise(quote)
