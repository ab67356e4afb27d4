"""Simulation of clients that send the next request when one ends, to choose the number of short steps.

    python tools/simulate_clients.py

A step takes what the 8B takes on an H200: 5.75 ms, 0.01 ms for each answer, and 0.0243 ms for each token beyond 190,
from where on products take longer than reading the weights. Prompts have 512 tokens, answers 256; `SHORT_STEPS` and
the chunk are those of `quire.engine.scheduler`. Prints times between tokens in ms, the share of them over twice the
median, and output tokens per second: served (256 requests, 64 at once, twelve seeds) and offline (64 at once, no later
ones).
"""

import random

import numpy as np

CHUNK, BUDGET, PROMPT, ANSWER = 256, 8192, 512, 256


def run(short_steps: int, requests: int, clients: int, seed: int, spread_ms: float) -> tuple[list[float], float]:
    """All gaps between tokens, and how long it took; short_steps 0: prompts always come first."""
    rng = random.Random(seed)
    arrivals = sorted(rng.random() * spread_ms for _ in range(clients))
    now, sent, ended = 0.0, clients, 0
    prompts: list[int] = []  # tokens left
    answers: list[list[float]] = []  # [time of the last token, tokens left]
    gaps: list[float] = []
    while ended < requests:
        while arrivals and arrivals[0] <= now:
            arrivals.pop(0)
            prompts.append(PROMPT)
        if not prompts and not answers:
            now = arrivals[0]
            continue
        decoding, room = len(answers), BUDGET - len(answers)
        chunk = max(CHUNK, decoding)
        if decoding and sum(prompts) <= short_steps * chunk:
            room = min(room, chunk)
        takes = np.diff([0, *np.minimum(np.cumsum(prompts), room)]).astype(int).tolist()
        now += 5.75 + 0.010 * decoding + 0.0243 * max(0, sum(takes) + decoding - 190)
        for answer in answers:
            gaps.append(now - answer[0])
            answer[:] = now, answer[1] - 1
        for _ in range(sum(not left for _, left in answers)):
            ended += 1
            if sent < requests:
                sent += 1
                arrivals.append(now + 2 + rng.random() * spread_ms)
        left = [have - take for have, take in zip(prompts, takes, strict=True)]
        answers = [answer for answer in answers if answer[1]] + [[now, ANSWER - 1] for have in left if not have]
        prompts = [have for have in left if have]
        arrivals.sort()
    return gaps, now


def main() -> None:
    """Print a line for each number of short steps."""
    print("steps   p50    p99 mean and worst   long gaps   served tok/s   offline tok/s")
    for steps in (0, 4, 8, 16, 32, 64):
        runs = [run(steps, 256, 64, seed, spread) for seed in range(4) for spread in (1.0, 4.0, 10.0)]
        p50, p99 = np.array([np.percentile(gaps, (50, 99)) for gaps, _ in runs]).T
        long = np.mean([np.mean(np.array(gaps) > 12.5) for gaps, _ in runs])
        served = np.mean([256 * ANSWER / ms * 1000 for _, ms in runs])
        offline = 64 * ANSWER / run(steps, 64, 64, 0, 0.0)[1] * 1000
        print(
            f"{steps:5} {p50.mean():6.2f} {p99.mean():9.1f} {p99.max():8.1f} {long:13.2%} {served:12.0f} "
            f"{offline:15.0f}"
        )


if __name__ == "__main__":
    main()
