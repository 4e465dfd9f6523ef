"""Rules between the keys of `model.optim`: what is refused, what is told to have no effect, names of NeMo."""

from config_helpers import load, problems
from tiers import looped

from stoker.trainer.config.schema.optim import OptimBlock, optimizer_kind, optimizer_settings

OPTIM, SCHED = "model.optim.", "model.optim.sched."


@looped(
    ("overrides", "key", "said"),
    [
        (["optim=adafactor", "model.optim.eps=1e-8"], OPTIM + "eps", "takes two values"),
        (["model.optim.eps=[1e-30,1e-3]"], OPTIM + "eps", "takes one value"),
        (["model.optim.name=sgd", "model.optim.nesterov=true"], OPTIM + "nesterov", "needs a `momentum`"),
        (
            ["optim=muon", "model.optim.momentum=0.0", "model.optim.nesterov=true"],
            OPTIM + "nesterov",
            "needs a `momentum`",
        ),
        (["optim=adafactor", "model.optim.warmup_init=true"], OPTIM + "warmup_init", "`relative_step`, which is False"),
        ([f"{SCHED}name=NoamAnnealing"], SCHED + "d_model", "root of `d_model`"),
        (
            [f"{SCHED}name=NoamHoldAnnealing", f"{SCHED}warmup_ratio=null"],
            SCHED + "warmup_steps",
            "needs warm-up steps",
        ),
        ([f"{SCHED}name=T5InverseSquareRootAnnealing"], SCHED + "constant_steps", "constant_steps"),
        ([f"{SCHED}hold_steps=5", f"{SCHED}hold_ratio=0.1"], SCHED + "hold_ratio", "set the same value"),
        ([f"{SCHED}name=CosineAnealing"], SCHED + "name", "must be one of"),
        ([f"{SCHED}name=CosineAnnealingExp"], SCHED + "name", "it is CosineAnnealing, with max_steps"),
        ([f"{SCHED}name=StepLR"], SCHED + "name", "depend on the step only"),
        ([f"{SCHED}name=ReduceLROnPlateau"], SCHED + "name", "depend on the step only"),
        ([f"{SCHED}name=PolynomialDecayAnnealing", f"{SCHED}cycle=true"], SCHED + "cycle", "no second cycle"),
        ([f"{SCHED}decay_steps=5"], SCHED + "decay_steps", "takes the steps left by"),
        (["model.optim.name=adam"], OPTIM + "name", "adds weight decay to the gradient"),
        (["model.optim.name=lamb"], OPTIM + "name", "use adamw"),
        (["model.optim.dampening=0.1"], OPTIM + "dampening", "without dampening"),
        (["optim=adafactor", "model.optim.decay_rate=0.8"], OPTIM + "decay_rate", ">= -1 and < 0"),
    ],
)
def test_what_cannot_be_is_refused(overrides, key, said):
    assert said in problems(*overrides)[key].rule


def test_an_unknown_schedule_is_told_the_nearest():
    assert problems(f"{SCHED}name=CosineAnealing")[SCHED + "name"].fix.endswith("=CosineAnnealing?")


@looped(
    ("overrides", "key"),
    [
        (["model.optim.momentum=0.9"], OPTIM + "momentum"),
        (["optim=sgd", "model.optim.betas=[0.8,0.9]"], OPTIM + "betas"),
        (["optim=muon", "model.optim.beta1=0.9"], OPTIM + "beta1"),
        (["optim=adafactor", "model.optim.nesterov=true"], OPTIM + "nesterov"),
        (["model.optim.relative_step=true"], OPTIM + "relative_step"),
        (["optim=adafactor", "model.optim.lr=0.1"], OPTIM + "lr"),
        (["model.optim.name=adafactor", "model.optim.relative_step=true", "model.optim.lr=0.1"], OPTIM + "lr"),
        (["model.optim.name=adafactor", "model.optim.relative_step=true", f"{SCHED}name=WarmupPolicy"], SCHED + "name"),
        ([f"{SCHED}hold_ratio=0.5"], SCHED + "hold_ratio"),
        ([f"{SCHED}power=2.0"], SCHED + "power"),
        ([f"{SCHED}name=WarmupHoldPolicy", f"{SCHED}hold_steps=5"], SCHED + "hold_steps"),
        ([f"{SCHED}name=WarmupPolicy", f"{SCHED}min_lr=1e-5"], SCHED + "min_lr"),
        (
            [f"{SCHED}name=NoamAnnealing", f"{SCHED}d_model=8", f"{SCHED}warmup_ratio=null", f"{SCHED}max_steps=50"],
            SCHED + "max_steps",
        ),
    ],
)
def test_a_key_without_effect_is_told(overrides, key):
    warned = [finding.keys[0] for finding in load(*overrides).findings if finding.level == "warning"]
    assert warned == [key]


@looped(
    "overrides",
    [
        *([f"optim={name}"] for name in ("adamw", "adafactor", "muon", "sgd")),
        ["model.optim.name=sgd"],
        ["model.optim.momentum=null", f"{SCHED}hold_steps=0", f"{SCHED}power=1.0"],
        [f"{SCHED}name=NoamAnnealing", f"{SCHED}d_model=8", f"{SCHED}max_steps=50"],
        [f"{SCHED}name=WarmupPolicy", f"{SCHED}min_lr=1e-5", f"{SCHED}max_steps=50"],
        [f"{SCHED}name=WarmupHoldAnnealLinear", f"{SCHED}hold_ratio=0.5"],
    ],
)
def test_what_acts_is_not_warned_of(overrides):
    assert not load(*overrides).findings


def test_nulls_mean_each_optimizers_own_values():
    def settings(name):
        return optimizer_settings(OptimBlock.model_validate({"name": name}))

    assert settings("sgd") == {"momentum": 0.0, "nesterov": False}
    assert (settings("muon")["momentum"], settings("muon")["nesterov"], settings("muon")["eps"]) == (0.95, True, 1e-8)
    assert settings("adafactor")["eps"] == [1e-30, 1e-3]
    assert (
        settings("fused_adam")
        == settings("adamw")
        == {
            "betas": [0.9, 0.98],
            "eps": 1e-8,
            "scale_parameter": False,
        }
    )
    assert optimizer_kind("mcore_distributed_optim") == "adamw"
