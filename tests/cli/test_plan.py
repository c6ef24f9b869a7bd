import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace_cli.plan import Plan, computes_on_cores, make_plan
from headrace_cli.settings import UpModel, UpSettings
from headrace_shared.errors import ConfigError
from headrace_shared.settings import load_settings

KEYS = Path("/data/credentials")


def plan(settings: UpSettings, environ: Mapping[str, str] | None = None, config: str = "") -> Plan:
    return make_plan(
        settings, environ or {}, nats_url="nats://127.0.0.1:4", credentials=KEYS, num_cores=8, config=config
    )


def test_one_process_for_each_service() -> None:
    made = plan(UpSettings())
    assert [spec.name for spec in made.services] == ["router-1", "scheduler-1", "worker-1", "autoscaler-1"]
    assert made.workers[0].command == (sys.executable, "-P", "-m", "headrace_worker")
    assert all(spec.environ["HEADRACE_NATS_URL"] == "nats://127.0.0.1:4" for spec in made.services)


def test_adapters_are_the_workers_business_wherever_they_run() -> None:
    made = plan(UpSettings(lora=("a=adapters/a", "b=/srv/b"), lora_dir="adapters", workers=2))
    here = Path.cwd()
    for spec in made.workers:
        assert spec.environ["HEADRACE_LORA"] == f"a={here}/adapters/a,b=/srv/b"
        assert spec.environ["HEADRACE_LORA_DIR"] == f"{here}/adapters"
    assert not any("HEADRACE_LORA" in spec.environ for spec in [*made.routers, *made.schedulers])
    with pytest.raises(ConfigError, match="one model"):
        plan(UpSettings(model=("x", "y"), lora=("a=adapters/a",)))


def test_each_service_gets_its_own_key_and_nobody_elses_password() -> None:
    environ = {"HEADRACE_NATS_PASSWORD": "x", "HEADRACE_NATS_USER": "x", "HEADRACE_BROKER_CREDENTIALS": "/mine"}
    for spec in plan(UpSettings(), environ).services:
        assert spec.environ["HEADRACE_BROKER_CREDENTIALS"] == f"/data/credentials/{spec.service}/user.nk"
        assert "x" not in spec.environ.values()
        assert not any("nk" in word for word in spec.command)


@pytest.mark.parametrize("given", ["", "0ms", "100", "2m", "100ms }"])
def test_what_is_no_interval_is_refused_before_the_broker_reads_it(given: str) -> None:
    with pytest.raises(ConfigError, match="--sync-interval"):
        load_settings(UpSettings, ["--sync-interval", given], {}, prog="headrace up")


def test_routers_take_ports_in_a_row() -> None:
    made = plan(UpSettings(routers=3, port=9000, host="0.0.0.0"))
    assert [(spec.port, spec.environ["HEADRACE_PORT"]) for spec in made.routers] == [
        (9000, "9000"),
        (9001, "9001"),
        (9002, "9002"),
    ]
    assert made.routers[0].environ["HEADRACE_HOST"] == "0.0.0.0"
    assert "HEADRACE_REQUIRE_KEYS" not in made.routers[0].environ


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "", "example.org"])
def test_other_machines_need_keys_or_an_explicit_word(host: str) -> None:
    with pytest.raises(ConfigError, match="--require-keys"):
        UpSettings(host=host).check()
    UpSettings(host=host, open_to_all=True).check()
    strict = UpSettings(host=host, require_keys=True)
    strict.check()
    assert plan(strict).routers[0].environ["HEADRACE_REQUIRE_KEYS"] == "True"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_needs_none(host: str) -> None:
    UpSettings(host=host).check()


def test_scheduler_and_worker_agree_on_the_name() -> None:
    for settings, name in (
        (UpSettings(), "smollm2-135m"),
        (UpSettings(model=("/models/tiny.gguf",)), "tiny"),
        (UpSettings(model=("org/model",)), "org/model"),
        (UpSettings(model=("/models/tiny.gguf",), served_name="mine"), "mine"),
    ):
        made = plan(settings)
        assert made.schedulers[0].environ["HEADRACE_MODEL"] == name
        assert made.workers[0].environ["HEADRACE_SERVED_NAME"] == name
        assert made.workers[0].environ["HEADRACE_MODEL"] == settings.models[0].source
        assert made.workers[0].model == made.schedulers[0].model == name


def test_workers_share_the_cores() -> None:
    assert plan(UpSettings(workers=3)).workers[0].environ["HEADRACE_NUM_THREADS"] == "2"
    assert plan(UpSettings(workers=20)).workers[0].environ["HEADRACE_NUM_THREADS"] == "1"
    assert plan(UpSettings(workers=3, num_threads=5)).workers[0].environ["HEADRACE_NUM_THREADS"] == "5"


def test_settings_of_services_come_from_the_environment() -> None:
    environ = {"HEADRACE_TOKENS_PER_ITERATION": "99", "PATH": "/bin"}
    worker = plan(UpSettings(device="cpu", max_sequences=3), environ).workers[0].environ
    assert worker["HEADRACE_TOKENS_PER_ITERATION"] == "99" and worker["PATH"] == "/bin"
    assert worker["HEADRACE_DEVICE"] == "cpu" and worker["HEADRACE_MAX_SEQUENCES"] == "3"
    assert "HEADRACE_DTYPE" not in worker


@pytest.mark.parametrize("config", ["/etc/headrace.yaml", "/etc/headrace.yaml#up"])
def test_each_service_reads_its_own_section(config: str) -> None:
    made = plan(UpSettings(), {"HEADRACE_CONFIG": "/other.yaml"}, config)
    assert [spec.environ["HEADRACE_CONFIG"] for spec in made.services] == [
        f"/etc/headrace.yaml#{service}" for service in ("router", "scheduler", "worker", "autoscaler")
    ]
    assert all("HEADRACE_CONFIG" not in spec.environ for spec in plan(UpSettings(), {"HEADRACE_CONFIG": "/x"}).services)


def test_no_autoscaler() -> None:
    assert plan(UpSettings(autoscaler=False)).autoscalers == []


def test_ranks_are_the_workers_business_and_count_as_processes() -> None:
    environ = plan(UpSettings()).workers[0].environ
    assert "HEADRACE_TENSOR_PARALLEL" not in environ, "the worker's own sources may say"
    settings = UpSettings(tensor_parallel=2, pipeline_parallel=3)
    environ = plan(settings).workers[0].environ
    assert (environ["HEADRACE_TENSOR_PARALLEL"], environ["HEADRACE_PIPELINE_PARALLEL"]) == ("2", "3")
    assert settings.num_ranks == 6 and UpSettings().num_ranks == 1


def test_several_models_each_with_its_workers_and_schedulers() -> None:
    settings = UpSettings(model=("smollm2-135m", "org/large=3", "~/m.gguf"), schedulers=2, workers=1)
    made = plan(settings)
    assert [spec.model for spec in made.schedulers] == [
        name for name in ("smollm2-135m", "org/large", "m") for _ in range(2)
    ]
    assert [spec.name for spec in made.schedulers] == [f"scheduler-{number}" for number in range(1, 7)]
    assert [(spec.name, spec.model) for spec in made.workers] == [
        ("worker-1", "smollm2-135m"),
        ("worker-2", "org/large"),
        ("worker-3", "org/large"),
        ("worker-4", "org/large"),
        ("worker-5", "m"),
    ]
    assert made.workers[1].environ["HEADRACE_MODEL"] == "org/large"
    assert made.workers[4].environ["HEADRACE_SERVED_NAME"] == "m"
    assert settings.num_workers == 5


def test_a_model_whose_file_has_no_readable_name_gets_another() -> None:
    source = "/models/\udcff.gguf"
    with pytest.raises(ConfigError, match="--served-name"):
        _ = UpSettings(model=(source,)).models
    assert UpSettings(model=(source,), served_name="tiny").models == (UpModel(source, "tiny", 1),)


@pytest.mark.parametrize(
    ("model", "served_name"),
    [((), ""), (("a", "x/y/a"), ""), (("a", "b"), "mine"), (("a=0",), ""), (("a=65",), ""), (("=2",), "")],
)
def test_models_that_make_no_sense_stop_the_start(model: tuple[str, ...], served_name: str) -> None:
    with pytest.raises(ConfigError):
        plan(UpSettings(model=model, served_name=served_name))


def test_an_instance_that_scales_has_places_and_an_autoscaler_that_acts() -> None:
    settings = UpSettings(autoscale=True, max_workers=4, min_workers=0, model=("a", "b=2"))
    made = plan(settings)
    assert [spec.model for spec in made.workers] == ["a", "b", "b"] and len(made.places) == 4
    assert made.workers[0].environ["HEADRACE_NUM_THREADS"] == "2"
    (autoscaler,) = made.autoscalers
    wanted = {"DRIVER": "process", "SERVED_MODELS": "a,b", "MIN_WORKERS": "0", "MAX_WORKERS": "4"}
    assert {name: autoscaler.environ[f"HEADRACE_{name}"] for name in wanted} == wanted
    third = made.worker("b", 3, is_parked=True)
    assert third.name == "worker-3" and third.environ["HEADRACE_PARKED"] == "true"
    assert third.environ["HEADRACE_SERVED_NAME"] == "b"
    assert plan(UpSettings()).places == () and "HEADRACE_DRIVER" not in plan(UpSettings()).autoscalers[0].environ


def test_where_there_are_gpus_each_place_has_its_own() -> None:
    def places(num_gpus: int, environ: Mapping[str, str] | None = None, **settings: Any) -> list[str | None]:
        scaled = UpSettings(autoscale=True, **settings)
        made = make_plan(scaled, environ or {}, nats_url="", credentials=KEYS, num_cores=8, num_gpus=num_gpus)
        return [place.get("CUDA_VISIBLE_DEVICES") for place in made.places]

    assert places(0) == [None] * 4
    assert places(8) == ["0", "1", "2", "3"]
    assert places(2) == ["0", "1"]
    assert places(8, tensor_parallel=2, max_workers=3) == ["0,1", "2,3", "4,5"]
    assert places(8, {"CUDA_VISIBLE_DEVICES": "5,7"}) == ["5", "7"]
    assert places(8, device="cpu") == places(8, sim=True) == [None] * 4


def test_limits_of_scaling_that_contradict_each_other_are_refused() -> None:
    for settings, problem in (
        (UpSettings(autoscale=True, autoscaler=False), "autoscale: needs the autoscaler"),
        (UpSettings(autoscale=True, workers=5), "workers: 5 in all exceeds max_workers, which is 4"),
        (UpSettings(autoscale=True, min_workers=3, model=("a", "b")), "min_workers: 6 in all exceeds"),
    ):
        with pytest.raises(ConfigError, match=problem):
            settings.check()
    UpSettings(workers=9, min_workers=7).check()


@pytest.mark.parametrize(
    ("settings", "environ", "num_gpus", "expected"),
    [
        (UpSettings(), {}, 0, True),
        (UpSettings(), {}, 1, False),
        (UpSettings(device="cpu"), {}, 1, True),
        (UpSettings(), {"HEADRACE_DEVICE": "cpu"}, 1, True),
        (UpSettings(device="cuda"), {}, 0, False),
        (UpSettings(sim=True), {}, 0, False),
        (UpSettings(), {"HEADRACE_ENGINE": "timing"}, 0, False),
    ],
)
def test_services_give_way_only_where_engines_share_their_cores(
    settings: UpSettings, environ: Mapping[str, str], num_gpus: int, expected: bool
) -> None:
    assert computes_on_cores(settings, environ, num_gpus) is expected
