"""Find the fastest setting whose loss is certified.

The settings of one rule form a ladder from strict to lax. All are tried on some problems; those that are faster than the best lossless policy and
have not shown too much harm become candidates. On OTHER problems each ladder is climbed from its strictest candidate: a setting is certified if the
bound on its harm is low enough, and the first that is not ends the climb. Each ladder has its share of δ, and its steps cost nothing more
(fixed-sequence testing: Maurer, Hothorn and Lehmacher 1995; Angelopoulos et al., "Learn then Test", 2021): whatever the order of the true losses,
the probability of certifying a setting with too high a loss is at most δ.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..artifacts.certificate import Certificate
from ..drafters.base import Drafter
from ..policy.parse import add_parameter, as_policy, is_short_form, list_parts, strip_paths
from ..policy.policy import LossyPolicy, compute_fingerprint
from ..registry import Kind, Names, find_entry
from ..stats.intervals import FEWEST, gain_bound, harm_bound, harms_allowed, net_bound, problems_needed
from ..tasks.base import Problem
from ..training.run_folder import RunFolder
from .arms import TARGET, Arm, Loaded, make_arms
from .comparison import ComparisonResult, compare_arms, list_batches
from .metrics import ArmMetrics, compute_gain
from .writer import TextWriter


DOUBT = 0.1  # level at which a setting whose harm on the first problems exceeds the limit is no candidate


@dataclass(frozen=True)
class Candidate:
    """One setting: `ladder` is its rule's name, `rank` counts from the strictest."""

    name: str
    ladder: str
    rank: int


@dataclass(frozen=True)
class TrialResult:
    """Result of a setting on some problems; `speed` in tokens per second."""

    speed: float
    harms: int
    gains: int
    problems: int


@dataclass(frozen=True)
class CertificationResult:
    """A setting's bounds on the certificate's problems, each on its own at its ladder's share of δ; `certified`: its harm is at most the limit.

    Jointly for all settings only the limit holds, not each one's bound, since the choice depends on the same problems.
    """

    step: Candidate
    tried: TrialResult
    harm: float
    net: float
    certified: bool


def choose_candidates(
    steps: Sequence[Candidate], tried: Mapping[str, TrialResult], lossless: float, max_loss: float
) -> list[Candidate]:
    """Return the steps worth certifying: faster than the best lossless policy (`lossless`, tokens per second), and not known to harm too much.

    A step is left out if its ladder has a faster one that harmed no more: it could only end the climb early.
    """

    def is_better(one: TrialResult, other: TrialResult) -> bool:
        return one.speed > other.speed and one.harms <= other.harms

    def may_pass(trial: TrialResult) -> bool:
        return trial.speed > lossless and gain_bound(trial.harms, trial.problems, DOUBT) <= max_loss

    fit = [s for s in sorted(steps, key=lambda s: (s.ladder, s.rank)) if may_pass(tried[s.name])]
    return [s for s in fit if not any(o.ladder == s.ladder and is_better(tried[o.name], tried[s.name]) for o in fit)]


def certify(
    steps: Sequence[Candidate], tried: Mapping[str, TrialResult], max_loss: float, delta: float
) -> list[CertificationResult]:
    """Climb every ladder. `tried`: results on problems that were not used to choose `steps`."""
    ladders: defaultdict[str, list[Candidate]] = defaultdict(list)
    for step in sorted(steps, key=lambda s: s.rank):
        ladders[step.ladder].append(step)
    results = []
    for ladder in ladders.values():
        share, climbing = delta / len(ladders), True
        for step in ladder:
            trial = tried[step.name]
            harm = harm_bound(trial.harms, trial.problems, share)
            net = net_bound(trial.harms, trial.gains, trial.problems, share)
            climbing = climbing and harm <= max_loss
            results.append(CertificationResult(step, trial, harm, net, climbing))
    return results


def find_fastest(results: Sequence[CertificationResult]) -> CertificationResult | None:
    """Return the fastest certified result, or None."""
    return max((result for result in results if result.certified), key=lambda result: result.tried.speed, default=None)


@dataclass(frozen=True)
class SearchSpace:
    """The settings of a search, by name: lossless ones, which need no certificate, and steps of ladders."""

    policies: dict[str, LossyPolicy]
    steps: list[Candidate]

    @property
    def lossless(self) -> list[str]:
        """Names of the lossless settings."""
        return [name for name, policy in self.policies.items() if policy.lossless]


def parse_search_space(texts: Sequence[str]) -> SearchSpace:
    """Parse the policies of `--policies`: `top_k+svip` is top_k's whole ladder with svip, `top_k:k=3+svip` one step.

    Raises: `ValueError`, one line, if there is no lossless policy for the others to beat.
    """
    space = SearchSpace({}, [])
    for text in texts:
        names = expand(text)
        for name in names:
            if name not in space.policies:
                space.policies[name] = as_policy(name)
                if not space.policies[name].lossless:
                    ladder = text if len(names) > 1 else _name_ladder(name)
                    space.steps.append(Candidate(name, ladder, sum(step.ladder == ladder for step in space.steps)))
    if not space.lossless:
        raise ValueError("no lossless policy is among these: add svip, or strict, which the others have to beat")
    return space


def expand(text: str) -> list[str]:
    """Return the settings that a text stands for, from strict to lax; the text alone if it names no ladder."""
    for name, options in _list_parts(text):
        ladder = _find_ladder(name)
        if ladder is not None and ladder[0] not in options:
            return [add_parameter(text, name, ladder[0], value) for value in ladder[1]]
    return [text]


def _list_parts(text: str) -> list[tuple[str, dict[str, str]]]:
    """Return the parts of a short form with their options; a name, a folder or JSON is one without options."""
    return list_parts(text) if is_short_form(text) else [(text, {})]


def _find_ladder(name: str) -> tuple[str, Sequence[object]] | None:
    """Return the parameter of a rule or method that a search tries, and its values from strict to lax."""
    kinds: tuple[Kind, ...] = ("rule", "method")
    entries = (find_entry(kind, name) for kind in kinds if name in Names(kind))
    return next((entry.ladder for entry in entries if entry.ladder is not None), None)


def _name_ladder(name: str) -> str:
    """Return the name of a single setting's ladder: settings of one rule form a ladder in the order in which they were given."""
    return next((step for step, _ in _list_parts(name) if _find_ladder(step) is not None), name)


@dataclass(frozen=True)
class Search:
    """Goal of a search: `max_loss` as a share (0.01 is one point), `delta` = 1 − confidence; settings are tried on the `first` problems."""

    max_loss: float
    delta: float
    first: int
    batch_size: int = 1


@dataclass(frozen=True)
class TuningResult:
    """Result of a search.

    Args:
        tried: figures on the problems that settings were tried on. certified: on the others, for the target, the best lossless
            policy and the candidates.
        results: of each candidate. best: the fastest certified one, if it clearly beats the best lossless policy and the target alone.
        lossless: figures of the best lossless policy.
    """

    tried: list[ArmMetrics]
    certified: list[ArmMetrics]
    results: list[CertificationResult]
    best: CertificationResult | None
    lossless: ArmMetrics


def tune_policies(
    writer: TextWriter,
    draft: PreTrainedModel | Drafter,
    space: SearchSpace,
    problems: Sequence[Problem],
    prompts: Sequence[str],
    search: Search,
    run: RunFolder | None = None,
) -> TuningResult:
    """Try every setting on the first problems and certify candidates on the rest.

    Args:
        writer: with the task that judges answers. prompts: the problems' texts as given to the models.
        run: has the answers, so that an interrupted run resumes, see `compare_arms`.

    Raises: `ValueError`, one line, if the target has so few right answers that a policy with none would be certified.
    """
    models, decoding, task = (writer.target, draft, writer.tokenizer), writer.decoding, writer.task

    def measure(policies: Mapping[str, LossyPolicy], first: int, end: int) -> ComparisonResult:
        def make(models: Loaded) -> tuple[TextWriter, list[Arm]]:
            arms = make_arms(models[0], models[1], policies, tokenizer=models[2], assisted=False)
            return TextWriter(models[0], models[2], decoding, task), arms

        batches, what = list_batches(end, [search.batch_size], first), "certifying" if first else "trying settings"
        arms, loaded = make(models)[1], (models, make)
        return compare_arms(writer, arms, prompts, batches, run, problems=problems, loaded=loaded, what=what)

    first = measure(space.policies, 0, search.first).metrics
    by = {metrics.arm: metrics for metrics in first}
    right = by[TARGET].right or 0
    if right <= search.max_loss * search.first:
        raise ValueError(
            f"the target has {right} of {search.first} problems right, so there is nothing to lose, and a policy with none right would "
            f"be certified at {search.max_loss:.2%}: see --max-new-tokens and --chat"
        )
    best_lossless = max((by[name] for name in space.lossless), key=lambda arm: arm.speed)
    to_beat = max(best_lossless.speed, by[TARGET].speed)
    chosen = choose_candidates(space.steps, _make_trials(first), to_beat, search.max_loss)
    certifying = {name: space.policies[name] for name in (best_lossless.arm, *(step.name for step in chosen))}
    second = measure(certifying, search.first, len(prompts))
    later = {metrics.arm: metrics for metrics in second.metrics}
    results = certify(chosen, _make_trials(second.metrics), search.max_loss, search.delta)
    best, lossless = find_fastest(results), later[best_lossless.arm]
    rival = max(lossless, later[TARGET], key=lambda arm: arm.speed).arm
    if best is not None and not _is_faster(second, best.step.name, rival):
        best = None  # a gain over a lossless arm that may be noise does not count
    return TuningResult(first, second.metrics, results, best, lossless)


def _make_trials(metrics: Sequence[ArmMetrics]) -> dict[str, TrialResult]:
    return {arm.arm: TrialResult(arm.speed, arm.worse, arm.better, arm.judged) for arm in metrics}


def _is_faster(result: ComparisonResult, arm: str, other: str) -> bool:
    """Return whether an arm is faster than another on the same prompts by more than the interval of their ratio; False for too few batches."""
    if len({answer.unit for answer in result.answers}) < FEWEST:
        return False
    gain = compute_gain(result.answers, arm, other)
    return (gain.value if gain.low is None else gain.low) > 1


def describe_power(problems: int, search: Search, ladders: int) -> str:
    """Return a description of what so many problems can certify, before anything is run."""
    share = search.delta / max(ladders, 1)
    allowed, least = harms_allowed(problems, search.max_loss, share), harm_bound(0, problems, share)
    needs = ", ".join(f"{problems_needed(h, search.max_loss, share)} with {h}" for h in (0, 1, 2, 5))
    can = (
        f"up to {allowed} harms certify {search.max_loss:.2%}"
        if allowed >= 0
        else f"too few for {search.max_loss:.2%}, {least:.2%} is the least they can certify"
    )
    ladder = f"; δ is shared by {ladders} ladders" if ladders > 1 else ""
    return f"{problems} problems for the certificate: {can} (needed: {needs} harms){ladder}"


def make_certificate(
    result: TuningResult, space: SearchSpace, search: Search, facts: Mapping[str, Any], decoding: Mapping[str, float]
) -> Certificate | None:
    """Return the certificate of the chosen setting; None if none was chosen.

    Args:
        facts: the run's, as in its record. decoding: settings of all arms.
    """
    best, by = result.best, {metrics.arm: metrics for metrics in result.certified}
    if best is None:
        return None
    models = {
        role: facts[role] | {"weights": facts[f"{role}_weights"], "dtype": facts[f"{role}_dtype"]}
        for role in ("target", "draft")
    }
    return Certificate(
        policy=strip_paths(best.step.name),
        fingerprint=compute_fingerprint(space.policies[best.step.name]),
        task=facts["source"],
        problems=best.tried.problems,
        right=by[TARGET].right or 0,
        harms=best.tried.harms,
        gains=best.tried.gains,
        harm_bound=best.harm,
        net_bound=best.net,
        confidence=1 - search.delta,
        max_loss=search.max_loss,
        tried=len(space.steps),
        batch_size=search.batch_size,
        speed=best.tried.speed,
        of_target=by[best.step.name].of_target.value,
        models=models,
        decoding=dict(decoding),
        data=facts["prompts_sha256"],
        machine=facts["machine"],
        versions=facts["versions"],
    )
