"""Dollars, replicas, shares of time and days to pay back. Arithmetic only; a price is always an input."""

from math import ceil

HOURS_A_MONTH = 720.0  # 30 days; a year's mean month has 730


def dollars_per_million(price_per_hour: float, tokens_per_second: float) -> float:
    """$ per million tokens of GPUs that cost `price_per_hour` together."""
    return price_per_hour / (tokens_per_second * 0.0036)


def implied_rate(price_per_hour: float, per_million: float) -> float:
    """Tokens a second at which that price gives that cost."""
    return price_per_hour / (per_million * 0.0036)


def amdahl(share: float, factor: float) -> float:
    """Speedup of the whole where `share` of the TIME becomes `factor` times faster."""
    return 1 / (1 - share + share / factor)


def replicas(demand: float, tokens_per_second: float, headroom: float = 1.0) -> int:
    """Whole replicas for a demand in tokens/s; `headroom`: share of a replica's rate that is planned with."""
    return max(1, ceil(demand / (headroom * tokens_per_second) - 1e-9)) if demand > 0 else 0


def gpus(demand: float, tokens_per_second: float, ranks: int, headroom: float = 1.0) -> int:
    """GPUs of whole replicas of `ranks` GPUs each."""
    return ranks * replicas(demand, tokens_per_second, headroom)


def gpus_of_hours(hours: float, month: float = HOURS_A_MONTH) -> float:
    """GPUs that so many GPU hours a month keep busy; not whole: a mean."""
    return hours / month


def payback_days(training_gpu_hours: float, gpus_before: int, gpus_after: int,
                 training_price: float = 1.0, serving_price: float = 1.0) -> float | None:
    """Days until the GPU hours saved pay what generation, capture and training took; None where nothing is saved."""
    saved = 24 * (gpus_before - gpus_after) * serving_price
    return training_gpu_hours * training_price / saved if saved > 0 else None
