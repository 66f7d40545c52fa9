"""What sweeps say of the end: sums of geometric series, rounding, mixtures of sweeps, plateaus."""

import math

import pytest
import torch

from pyro_cvi.running import still_gains
from pyro_cvi.stopping import Progress


def followed(bounds, tol=0.01, floor=1e-12, plain=None, moved=math.inf):
    """After sweeps with these bounds; the last one moved so far, those before it ten times as far."""
    progress = Progress(tol, floor=floor)
    for i, b in enumerate(bounds):
        progress.add(-b, plain=plain is None or plain[i])
    progress.moves[-4:] = [moved * 10.0**i for i in range(min(4, len(bounds)))][::-1]
    return progress


def test_a_mean_that_creeps_behind_what_has_settled_is_seen():
    gains = [10.0, 1e-2, 1e-5, 4e-6, 3.9e-6]
    progress = Progress(0.01, floor=1e-12)
    for i, moved in enumerate([math.inf, math.inf, 0.1, 0.005, 0.0027, 0.00265]):
        progress.add(-sum(gains[:i]))
        progress.moved = moved
    assert progress.left < 0.01
    assert progress.left_to_move > 0.1
    assert not progress.is_end()


def geometric(ratio, n, first=10.0):
    """Bounds whose gains fall by a ratio, and what is left after the last one."""
    gains = [first * ratio**i for i in range(n)]
    return [sum(gains[:i]) for i in range(n + 1)], first * ratio**n / (1 - ratio)


@pytest.mark.parametrize("ratio", [0.01, 0.3, 0.7, 0.95, 0.999])
def test_what_a_geometric_series_leaves_is_known(ratio):
    bounds, left = geometric(ratio, 12)
    assert followed(bounds).left == pytest.approx(left, rel=1e-6)


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9, 0.99])
def test_a_run_ends_with_less_than_tol_left_and_not_much_later(ratio):
    progress, total = Progress(0.01, floor=1e-12), 10 / (1 - ratio)
    bound, gain, sweeps = 0.0, 10.0, 0
    while True:
        progress.add(-bound)
        # A gain of g nats moves a mean of a Gaussian by sqrt(2 g) standard deviations.
        progress.moved = math.sqrt(2 * gain / ratio)
        if progress.is_end():
            break
        bound, gain, sweeps = bound + gain, gain * ratio, sweeps + 1
    assert total - bound < 0.01
    far = math.sqrt(2 * gain / ratio) * math.sqrt(ratio) / (1 - math.sqrt(ratio))
    assert far <= 0.01
    assert far > 0.009 * ratio**1.5  # at most one sweep later than it might


def test_a_small_gain_is_not_the_end_where_sweeps_creep():
    bounds, left = geometric(0.9999, 50, first=0.005)
    progress = followed(bounds, moved=1e-3)
    assert left > 0.01
    assert not progress.is_end()


def test_an_exact_model_ends_at_its_second_sweep():
    assert followed([-3.0, -3.0], moved=0.0).is_end()
    assert not followed([-3.0], moved=0.0).is_end()


def test_one_gain_says_nothing_of_what_is_left():
    assert not followed([0.0, 1e-4], moved=0.0).is_end()


def test_rounding_is_the_floor():
    bounds = [0.0, 1000.0, 1000.4, 1000.1, 1000.3]
    assert followed(bounds, floor=0.5, moved=1e-4).is_end()
    assert not followed(bounds, floor=1e-9, moved=1e-4).is_end()


def test_ratios_of_roundings_do_not_count():
    bounds = [0.0, 10.0, 10.0 + 3e-13, 10.0 + 9e-13]
    assert followed(bounds, floor=1e-12, moved=1e-8).is_end()


def test_a_mixture_of_sweeps_hides_what_creeps():
    creeping = [100 - 0.98**i for i in range(20)]
    bounds = [*creeping, 99.9999, 99.99991]
    plain = [True] * 20 + [False, True]
    progress = followed(bounds, plain=plain, moved=1e-3)
    assert progress.ratio == pytest.approx(0.98)
    assert progress.asks_for_plain


def test_gains_that_grow_are_a_way_off_a_plateau():
    bounds = [0.0, 1e-6, 2.1e-6, 3.4e-6]
    assert not followed(bounds, moved=1e-4).is_end()


def test_what_was_slow_far_from_the_optimum_does_not_count_near_it():
    gains = [100.0, 150.0, 20.0, 1.0, 1e-2, 1e-6]
    bounds = [sum(gains[:i]) for i in range(len(gains) + 1)]
    assert followed(bounds, moved=1e-4).is_end()


def test_a_mean_that_has_far_to_go_is_not_the_end():
    bounds, _ = geometric(0.5, 20)
    assert followed(bounds, moved=0.0003).is_end()
    assert not followed(bounds, moved=0.01).is_end()


def test_sweeps_that_are_long_and_short_in_turn_are_compared_two_and_two():
    gains = [1.0, 0.08, 0.04, 0.02, 0.01, 4e-3, 8e-4]
    progress = Progress(0.01, floor=1e-12)
    for i, moved in enumerate([math.inf, math.inf, math.inf, 0.04, 0.15, 0.019, 0.078, 0.0068]):
        progress.add(-sum(gains[:i]))
        progress.moved = moved
    assert progress.left_to_move > 0.05


def test_a_bound_that_is_absurd_is_known():
    progress = followed([-1e12, -1e12], moved=0.0)
    progress.least = -1e5
    assert progress.is_absurd


def test_no_end_without_a_tolerance():
    assert not followed([-3.0, -3.0], tol=0.0, moved=0.0).is_end()
    assert not followed([-3.0, -3.0], tol=-1.0, moved=0.0).is_end()


def walking(gains, moves, walked):
    """Sweeps with these gains and moves, the first and the last of which are so far apart."""
    progress = Progress(0.01, floor=1e-5)
    for i, moved in enumerate([math.inf, *moves]):
        progress.add(-sum(gains[:i]))
        progress.moved = moved
    progress.walked = walked
    return progress


def test_means_that_go_to_and_fro_without_a_gain_are_at_the_end():
    gains, moves = [3e-5, -3e-5, -1e-6] * 4, [0.0071, 0.0078, 0.0007] * 4
    assert walking(gains, moves, walked=0.002).is_end()


def test_means_that_creep_without_a_gain_are_not():
    gains, moves = [3e-5, -3e-5, -1e-6] * 4, [0.0071, 0.0078, 0.0077] * 4
    assert not walking(gains, moves, walked=0.06).is_end()


def test_means_that_go_to_and_fro_and_gain_are_not():
    gains, moves = [3e-5, 3e-5, 3e-5] * 4, [0.0071, 0.0078, 0.0077] * 4
    assert not walking(gains, moves, walked=0.002).is_end()


def crept(moves, after=0.0, taken=True, mixtures=4):
    """Mixtures, plain sweeps that hardly gain and moved so far, then another mixture if it is asked."""
    progress, bound = Progress(0.01, floor=1e-12), 0.0
    for i, moved in enumerate([*[0.5] * mixtures, *moves]):
        bound += 1e-5 * 0.1 ** max(0, i - mixtures)
        progress.add(-bound, plain=i >= mixtures)
        progress.moved = moved
        ended = progress.is_end()
        if progress.asks_for_mixture:
            break
    asked = progress.asks_for_mixture
    if asked:
        progress.add(-bound - 1e-9, plain=not taken)
        progress.moved = after
        ended = progress.is_end()
    return asked, ended


def test_a_run_that_creeps_ends_only_after_a_short_mixture():
    short = [3e-4, 1e-5, 1e-7]
    assert crept(short, after=0.005) == (True, True)
    assert crept(short, after=0.02) == (True, False)


def test_a_run_of_few_mixtures_has_not_crept():
    assert crept([3e-4, 1e-5, 1e-7], mixtures=2) == (False, True)


def test_a_mixture_that_is_refused_leaves_the_word_to_the_sweep():
    assert crept([3e-4, 1e-5, 1e-7], after=1e-8, taken=False) == (True, True)
    assert crept([3e-4, 1e-5, 1e-7], after=0.05, taken=False) == (True, False)


def test_one_move_of_some_length_is_not_the_end():
    """Of 0.005 sd after 0.009: the two together might be the end of a fall, or of nothing."""
    progress = Progress(0.01, floor=1e-4)
    for loss, moved in [(9.0, math.inf), (5.0, math.inf), (4.99999, 0.0092), (4.99998, 0.0047)]:
        progress.add(loss)
        progress.moved = moved
    assert progress.may_end
    assert not progress.is_end()


def test_steps_that_are_lengthened_in_turns_are_not_the_end():
    """Every fourth sweep goes 0.02 sd, those between fall to 8e-4."""
    progress = Progress(0.01, floor=1e-12)
    for i, moved in enumerate([0.02, 0.002, 0.001, 8e-4] * 3):
        progress.add(9.0 - 1e-3 * i + 2e-4 * (i % 4))
        progress.moved = moved
        assert not progress.is_end()


@pytest.mark.parametrize("seed", range(5))
def test_noisy_losses_fall_or_stand(seed):
    torch.manual_seed(seed)
    noise = torch.randn(100, dtype=torch.float64)
    assert not still_gains(noise.tolist())
    assert still_gains((noise - 0.2 * torch.arange(100)).tolist())
    assert not still_gains((noise + 0.2 * torch.arange(100)).tolist())
    assert not still_gains([5.0, 1.0])
