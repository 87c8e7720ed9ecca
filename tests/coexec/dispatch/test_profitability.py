"""The account: when following is given up and taken up again, by what calls take. Seconds here are made up."""

import pytest

from coexec.base.tuning import tuning
from coexec.dispatch.profitability import Profitability

pytestmark = pytest.mark.clocked

PLAIN = 1.0


def spend(account, calls, followed, clean=False):
    """Makes calls that take so long if they are followed; returns which of them were."""
    found = []
    for _ in range(calls):
        follows = account.admit()
        found.append(follows)
        if follows:
            account.followed(followed, clean)
        else:
            account.ran_plainly(PLAIN)
    return found


def test_without_doubt_nothing_is_timed():
    """Calls that meet nothing new are all followed, however long they take."""
    assert all(spend(Profitability(), 1000, 100.0, clean=True))


def test_doubt_takes_a_few_plain_calls():
    """After enough calls that met something new, one runs plainly, then ever fewer, as following is faster."""
    found = spend(Profitability(), 1000, 0.9)
    first = found.index(False)
    assert first == tuning.doubt_before_timing / 2
    assert found[first : first + 2] == [False, True]
    assert found.count(False) == tuning.plain_calls_kept
    assert found[first : first + 20].count(False) < tuning.plain_calls_kept


def test_hardly_any_plain_calls_where_following_is_clearly_faster():
    """In the first thirty calls two: each takes as long as many followed ones."""
    account = Profitability()
    found = spend(account, 30, 0.1)
    assert found.count(False) == 2
    found += spend(account, 2000, 0.1)
    assert found.count(False) == tuning.plain_calls_kept


def test_what_learning_has_cost_decides_nothing():
    """Calls that were slow before anything was timed are no reason to pause where those behind it are fast."""
    account = Profitability()
    spend(account, int(tuning.doubt_before_timing / 2), 100.0)
    assert not account.admit()
    account.ran_plainly(PLAIN)
    assert spend(account, 1000, 0.9).count(False) == tuning.plain_calls_kept - 1
    assert account.pause == 0


def test_learning_that_goes_on_ends_before_the_tenth_call():
    """A function that is slow in all calls that are followed is given up soon, and tried again seldom."""
    account = Profitability()
    found = spend(account, 30, 3.0)
    assert found.index(False) < 4
    assert not any(found[7:])
    assert sum(3.0 if follows else PLAIN for follows in found) <= 30 * PLAIN + 2.0 * 5


@pytest.mark.parametrize("short", range(8))
def test_a_call_that_returns_at_once_says_nothing_of_the_others(short):
    """Two calls in a row of eight do next to nothing: which of them are timed first does not decide."""
    account, imperative = Profitability(), 0
    for number in range(64):
        brief = (number - short) % 8 < 2
        if account.admit():
            slow = 30.0 if number < 6 else 0.3
            account.followed(0.03 if brief else slow, clean=number > 6, most=4.0, operations=2 if brief else 300)
        else:
            imperative += 1
            account.ran_plainly(0.01 if brief else PLAIN, tensors=2 if brief else 300)
    assert imperative <= 2 * tuning.plain_calls_kept
    assert account.pause == 0


@pytest.mark.parametrize("short", range(4))
def test_calls_of_which_most_return_at_once_are_given_up_where_the_others_do_not_pay(short):
    account, taken, plain = Profitability(), 0.0, 0.0
    for number in range(400):
        brief = (number - short) % 4 > 0
        seconds = eager = 0.01 if brief else PLAIN
        if account.admit():
            seconds = 0.01 if brief else 3.0
            account.followed(seconds, clean=False, most=4.0, operations=2 if brief else 300)
        else:
            account.ran_plainly(seconds, tensors=2 if brief else 300)
        taken, plain = taken + seconds, plain + eager
    assert taken < 1.2 * plain


@pytest.mark.parametrize("brief", [0, 16])
@pytest.mark.parametrize("every", [1, 4])
def test_calls_that_do_little_say_nothing_of_those_that_come_later(brief, every):
    """A buffer of experience is filled first, by calls for which following does not pay; then some train."""
    account, taken, plain, trained = Profitability(), 0.0, 0.0, 0
    account.recorded(2, 3)
    for number in range(400):
        trains = number >= brief and number % every == 0
        eager = PLAIN if trains else 0.002
        if account.admit():
            trained += trains
            slow, most = trained < 5, 2.0 if trained == 1 else 1.0
            seconds = (3.0 if slow else 0.1) if trains else 0.005
            account.followed(seconds, clean=not (trains and slow), most=most, operations=300 if trains else 2)
        else:
            seconds = eager
            account.ran_plainly(seconds, tensors=450 if trains else 3)
        taken, plain = taken + seconds, plain + eager
    assert taken < 0.4 * plain


def test_a_model_that_grows_is_compared_with_calls_of_its_size():
    account = Profitability()
    account.recorded(100, 130)
    for number in range(200):
        grown = number >= 40
        operations, eager = (400, 4.0) if grown else (100, 1.0)
        if account.admit():
            learning = number % 40 < 5
            account.followed(1.5 * eager if learning else 0.8 * eager, clean=not learning, most=2.0,
                             operations=operations)  # fmt: skip
        else:
            account.ran_plainly(eager, tensors=round(1.3 * operations))
    assert account.pause == 0


def test_reports_compare_calls_of_all_sizes():
    """One call in four does much: eager's time is the mean, too."""
    account = Profitability()
    account.recorded(100, 120)
    for number in range(64):
        much = number % 4 == 0
        if account.admit() and number >= 8:
            seconds = 0.5 if much else 0.05
            account.followed(seconds, clean=True, operations=100 if much else 10)
            account.timed(seconds, steady=True, operations=100 if much else 10)
        else:
            account.ran_plainly(1.0 if much else 0.1, tensors=120 if much else 12)
    assert account.pace().eager == pytest.approx(0.325, rel=0.1)


def test_one_busy_moment_leads_to_no_pause():
    """A call in which nothing is new, and that took very long, is an accident; two in a row are not."""
    account = Profitability()
    spend(account, 10, 0.5)
    assert not account.followed(1000.0, clean=False, most=tuning.following_patience)
    assert spend(account, 20, 0.5).count(True) >= 18
    assert account.pause == 0
    assert [account.followed(1000.0, clean=False, most=tuning.following_patience) for _ in range(8)][-1]
    assert account.pause > 0


def test_compiling_leads_to_no_pause():
    """Two calls behind the plain one that compile, and take long, are followed by ever faster ones."""
    account = Profitability()
    spend(account, int(tuning.doubt_before_timing / 2) + 1, 4.0)
    for _ in range(2):
        assert account.admit()
        assert not account.followed(8.0, clean=False, most=tuning.following_compiled)
    assert spend(account, 30, 0.2).count(True) >= 28
    assert account.pause == 0


def test_nothing_is_timed_where_calls_have_just_been_compiled():
    """A function that is compiled in its second followed call, and fast from the third on, is always followed."""
    account = Profitability()
    account.followed(5.0, clean=False)
    account.followed(4.0, clean=False, compiled=True)
    account.followed(0.4, clean=False)
    assert all(spend(account, 100, 0.1, clean=True))


def test_nothing_is_timed_while_calls_get_faster():
    """Each call that took clearly less than the one before raises no doubt; two that did not, do."""
    account = Profitability()
    for number in range(20):
        assert account.admit()
        account.followed(10.0 * 0.7**number, clean=False)
    last = 10.0 * 0.7**19
    found = spend(account, 10, last)
    assert found.index(False) == 1


def test_learning_goes_on_where_known_calls_are_fast():
    """Calls on ways that take turns, of which some are known, and fast: the others are learnt before any pause."""
    account = Profitability()
    spend(account, int(tuning.doubt_before_timing / 2) + 1, 4.0)
    for number in range(30):
        new = number in (0, 2, 3, 5, 6, 8)
        while not account.admit():
            account.ran_plainly(PLAIN)
        account.timed(4.0 if new else 0.2, steady=not new)
        account.followed(4.0 if new else 0.2, clean=not new, most=tuning.following_new_path)
    assert account.pause == 0


def test_progress_tries_no_patience():
    """Calls that cost ever less are followed until they pay, though they cost more than the patience in sum."""
    account = Profitability()
    learning = [20.0, 14.0, 10.0, 7.0, 5.0, 3.5, 2.5, 1.8, 1.4]
    assert sum(learning[3:]) - 6 > 2 * tuning.following_patience
    followed = 0
    for _ in range(30):
        if account.admit():
            account.followed(learning[followed] if followed < len(learning) else 0.1, clean=False)
            followed += 1
        else:
            account.ran_plainly(PLAIN)
    assert followed >= 27
    assert account.pause == 0


def test_one_fast_call_in_two_is_not_enough():
    """Where slow calls cost more than fast ones save, calls run plainly, though many are fast."""
    account = Profitability()
    took, number = 0.0, 0
    for _ in range(1000):
        if account.admit():
            number += 1
            took += 0.8 if number % 2 else 2.0
            account.followed(0.8 if number % 2 else 2.0, clean=False)
        else:
            took += PLAIN
            account.ran_plainly(PLAIN)
    assert took < 1000 * PLAIN * (1 + 2 * tuning.tries_share)


def test_an_investment_takes_no_more_than_savings():
    """Calls at other sizes use up what was saved, and lead to no pause; then there is nothing to afford more."""
    account = Profitability()
    spend(account, 100, 0.1)
    assert account.affords()
    for _ in range(10):
        account.invested(5 * PLAIN)
    assert not account.affords()
    assert all(spend(account, 20, 0.1))
    assert account.affords()


def test_a_busy_moment_is_made_good():
    """A plain call that took long by chance, when it was first timed, does not keep slow calls followed."""
    account = Profitability()
    spend(account, int(tuning.doubt_before_timing / 2), 2.0)
    assert not account.admit()
    account.ran_plainly(100 * PLAIN)
    assert spend(account, 1000, 2.0).count(True) < 100


def test_doubt_passes():
    """Something new in every third call is nothing to doubt for."""
    account = Profitability()
    for _ in range(300):
        assert account.admit()
        account.followed(100.0, clean=False)
        account.followed(100.0, clean=True)
        account.followed(100.0, clean=True)


@pytest.mark.parametrize("factor", [1.1, 2.0, 10.0])
def test_losses_are_bounded(factor):
    """Following that never pays costs an allowance, and hardly more than plain calls after that."""
    account = Profitability()
    early = sum(factor if follows else PLAIN for follows in spend(account, 2000, factor))
    learning = tuning.doubt_before_timing / 2 + 1.5 * tuning.following_patience + 2
    assert early <= 2000 * PLAIN * (1 + tuning.tries_share) + learning * factor
    late = sum(factor if follows else PLAIN for follows in spend(account, 2000, factor))
    assert late <= 2000 * PLAIN * (1 + tuning.tries_share) + factor


@pytest.mark.parametrize("factor", [1.2, 2.0, 4.0])
def test_tries_cost_a_share(factor):
    """Once in debt, the calls that are followed to see whether it pays by now cost a small share of the time."""
    account = Profitability()
    spend(account, 4 * tuning.following_allowance, factor)
    took = sum(factor if follows else PLAIN for follows in spend(account, 1000, factor))
    assert took <= 1000 * PLAIN * (1 + tuning.tries_share) + tuning.following_patience / 2 + factor


def test_pauses_grow():
    """Each call that was too slow makes the next pause twice as long, up to a bound."""
    account = Profitability()
    spend(account, 5 * tuning.max_backoff, 10.0)
    assert account.pause == tuning.max_backoff


def test_it_comes_back():
    """Once followed calls are fast they make good for the debt, and there are no pauses any more."""
    account = Profitability()
    spend(account, 5 * tuning.max_backoff, 10.0)
    spend(account, tuning.max_backoff + 2 * tuning.following_allowance, 0.5)
    assert all(spend(account, 1000, 0.5))
    assert account.pause < tuning.min_backoff


def test_learning_is_paid_by_what_it_brings():
    """A slow call in ten is no reason to pause if the nine others save more."""
    account = Profitability()
    for _ in range(100):
        assert account.admit() or account.paused >= 0
        account.followed(4.0, clean=False)
        for _ in range(9):
            account.followed(0.2, clean=True)
    assert account.paused == 0


def test_whoever_wants_to_know_eagers_time_has_a_call_timed_without_a_doubt(tune):
    """That is one of the steady state, and what was lost before decides nothing."""
    tune(calm_before_timing=4)
    account = Profitability()
    spend(account, 1, 100.0)
    found = spend(account, 1000, 0.9, clean=True)
    assert found.index(False) == tuning.calm_before_timing
    assert found.count(False) == tuning.plain_calls_kept
    assert account.pace().eager == PLAIN
    assert account.pause == 0


def test_turns_of_a_training_loop_are_what_is_reported():
    """Also where a call makes several of them."""
    account = Profitability()
    account.ran_plainly(PLAIN)
    account.steps = 4
    account.timed(1.0, steady=True, watched=0.5)
    pace = account.pace()
    assert (pace.steady, pace.eager) == (0.25, PLAIN)
    assert (pace.made, pace.spent) == (5, 2.5)


def retried(recurs):
    """Follows two calls on new paths after a backoff, and then calls that learn; returns how many it follows."""
    account = Profitability()
    while not account.backs_off:
        spend(account, 1, 3.0)
    while not account.admit():
        account.ran_plainly(PLAIN)
    for _ in range(2):
        assert not account.followed(2.0, clean=False, most=tuning.following_compiled)
    for followed in range(8):
        if account.followed(6.0, clean=False, most=tuning.following_compiled, compiled=True, recurs=recurs):
            return followed + 1
    return followed + 1


def test_what_recurs_is_learnt_to_its_end():
    """Calls on known paths that are slow as they compile go on, before any has met nothing new; others do not."""
    assert retried(recurs=True) > 4
    assert retried(recurs=False) <= 2
