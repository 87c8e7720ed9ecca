"""The account: when following is given up and taken up again, by what calls take. Seconds here are made up."""

import pytest

from coexec.account import ALLOWANCE, KNOWN, MAX_PAUSE, MIN_PAUSE, SHARE, TRIES, TRIES_SHARE, Account, doubtful

pytestmark = pytest.mark.clocked

PLAIN = 1.0


def spend(account, calls, followed, clean=False):
    """Makes calls that take so long if they are followed; returns which of them were."""
    found = []
    for _ in range(calls):
        follows = account.follows()
        found.append(follows)
        if follows:
            account.followed(followed, clean)
        else:
            account.ran_plainly(PLAIN)
    return found


def test_without_doubt_nothing_is_timed():
    """Calls that meet nothing new are all followed, however long they take."""
    assert all(spend(Account(), 1000, 100.0, clean=True))


def test_doubt_takes_a_few_plain_calls():
    """After enough calls that met something new, two run plainly, then ever fewer, as following is faster."""
    found = spend(Account(), 1000, 0.5)
    first = found.index(False)
    assert first == doubtful / 2
    assert found[first : first + 2] == [False, False]
    assert found.count(False) == KNOWN
    assert found[first : first + 20].count(False) < KNOWN


def test_a_busy_moment_is_made_good():
    """Plain calls that took long by chance, when they were first timed, do not keep slow calls followed."""
    account = Account()
    spend(account, int(doubtful / 2), 2.0)
    for _ in range(2):
        assert not account.follows()
        account.ran_plainly(100 * PLAIN)
    assert spend(account, 1000, 2.0).count(True) < 100


def test_doubt_passes():
    """Something new in every third call is nothing to doubt for."""
    account = Account()
    for _ in range(300):
        assert account.follows()
        account.followed(100.0, clean=False)
        account.followed(100.0, clean=True)
        account.followed(100.0, clean=True)


@pytest.mark.parametrize("factor", [1.1, 2.0, 10.0])
def test_losses_are_bounded(factor):
    """Following that never pays costs an allowance, and hardly more than plain calls after that."""
    account = Account()
    early = sum(factor if follows else PLAIN for follows in spend(account, 2000, factor))
    assert early <= 2000 * PLAIN * (1 + SHARE) + (2 * ALLOWANCE + 8 * TRIES) * factor
    late = sum(factor if follows else PLAIN for follows in spend(account, 2000, factor))
    assert late <= 2000 * PLAIN * (1 + SHARE + 2 * TRIES * factor / MAX_PAUSE)


@pytest.mark.parametrize("factor", [1.2, 2.0, 4.0])
def test_tries_cost_a_share(factor):
    """Once in debt, the calls that are followed to see whether it pays by now cost a small share of the time."""
    account = Account()
    spend(account, 4 * ALLOWANCE, factor)
    took = sum(factor if follows else PLAIN for follows in spend(account, 1000, factor))
    assert took <= 1000 * PLAIN * (1 + SHARE + TRIES_SHARE) + TRIES * (factor - 1)


def test_pauses_grow():
    """Each call that was too slow makes the next pause twice as long, up to a bound."""
    account = Account()
    spend(account, 5 * MAX_PAUSE, 10.0)
    assert account.pause == MAX_PAUSE


def test_it_comes_back():
    """Once followed calls are fast they make good for the debt, and there are no pauses any more."""
    account = Account()
    spend(account, 5 * MAX_PAUSE, 10.0)
    spend(account, MAX_PAUSE + 2 * ALLOWANCE, 0.5)
    assert all(spend(account, 1000, 0.5))
    assert account.pause < MIN_PAUSE


def test_learning_is_paid_by_what_it_brings():
    """A slow call in ten is no reason to pause if the nine others save more."""
    account = Account()
    for _ in range(100):
        assert account.follows() or account.paused >= 0
        account.followed(4.0, clean=False)
        for _ in range(9):
            account.followed(0.2, clean=True)
    assert account.paused == 0
