"""The largest batch that fits: each step of the search is a run."""

from tools.fit.run import FITS, OUT_OF_MEMORY, STOPPED

RUNS = 12
EXACT = 16  # samples: up to here, the search ends at neighbors; beyond, at 1/16


def largest(run, first, given, memory):
    """Bisect. run(n) gives the Result with n samples per replica; given: that with `first` of them,
    or with an unknown number, None. memory: bytes. Returns {"per_replica", "peak", "next", "runs",
    "reason"}: next: the smallest number that was seen not to fit; reason: what ended the search."""
    peaks, too_many, runs, reason = {}, None, 0, ""
    if first and given.outcome == FITS:
        peaks[first] = given.peak_of_step
    elif first and given.outcome == OUT_OF_MEMORY:
        too_many = first
    while runs < RUNS:
        number = _next(peaks, too_many, memory)
        if number is None:
            break
        result = run(number)
        runs += 1
        if result.outcome == FITS:
            peaks[number] = result.peak_of_step
        elif result.outcome == OUT_OF_MEMORY:
            too_many = number
        if result.outcome == STOPPED:
            reason = result.reason
            break
    best = max(peaks, default=0)
    return {
        "per_replica": best,
        "peak": peaks.get(best),
        "next": too_many,
        "runs": runs,
        "reason": reason,
    }


def _next(peaks, too_many, memory):
    """The number to try next, or None when the search has ended."""
    best = max(peaks, default=0)
    if too_many is not None:
        if too_many - best <= max(1, best // EXACT):
            return None
        if not best:
            return 1 if too_many <= 4 else too_many // 4
    elif not best:
        return 1
    guess = 4 * best
    if len(peaks) > 1:  # memory grows by the same for each sample
        lower = sorted(peaks)[-2]
        per_sample = (peaks[best] - peaks[lower]) / (best - lower)
        if per_sample > 0:
            guess = best + int((memory - peaks[best]) / per_sample)
    elif too_many is not None:
        guess = (best + too_many) // 2
    if too_many is None:
        return min(max(guess, best + max(1, best // EXACT)), 16 * best)
    if not best < guess < too_many:  # part of the memory grows in larger steps
        guess = (best + too_many) // 2
    return min(max(guess, best + 1), too_many - 1)
