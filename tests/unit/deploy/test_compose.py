"""Tests that settings and volumes of the compose file for one machine match the services and images."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.observability.__main__ import files
from services.controller.settings import ControllerSettings
from services.transferqueue.settings import TransferQueueSettings
from tests.helpers.chart import ROOT
from tests.helpers.images import stage_of, target_of
from tests.helpers.tools import require

FOLDER = ROOT / "deploy" / "compose"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
IMAGE = stage_of("local")
PROMETHEUS = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
SETTINGS = {"controller": ControllerSettings, "transferqueue": TransferQueueSettings}


def settings_of(name: str, monkeypatch: pytest.MonkeyPatch):
    """Returns a service's settings from its environment, and asserts that all names are known."""
    prefix = SETTINGS[name].model_config["env_prefix"]
    environment = SERVICES[name]["environment"]
    assert all(isinstance(value, str) for value in environment.values())
    own_names = {key for key in environment if key.startswith("SLIPSTREAM_")}
    assert {key.removeprefix(prefix).lower() for key in own_names} <= set(
        SETTINGS[name].model_fields
    )
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    return SETTINGS[name]()


def test_the_services_accept_their_settings_and_find_each_other(monkeypatch):
    controller = settings_of("controller", monkeypatch)
    controller.check_users()
    queue = settings_of("transferqueue", monkeypatch)
    assert controller.launcher == "process"
    assert controller.transferqueue_address == queue.bind
    scraped = {
        target
        for job in PROMETHEUS["scrape_configs"]
        for config in job.get("static_configs", ())
        for target in config["targets"]
    }
    assert scraped == {f"127.0.0.1:{settings.metrics_port}" for settings in (controller, queue)}
    (workers,) = PROMETHEUS["scrape_configs"][1]["file_sd_configs"]
    assert workers["files"] == [str(controller.metric_targets)]
    for path in (queue.arena_folder, queue.sample_folder, queue.snapshot_folder):
        assert path is not None
        assert path.is_relative_to(controller.state_directory)


def test_what_has_no_secret_is_open_on_loopback_alone(monkeypatch):
    for name in SETTINGS:
        assert settings_of(name, monkeypatch).bind.startswith("127.0.0.1:")
    for name in ("transferqueue", "prometheus"):
        assert SERVICES[name]["network_mode"] == "service:controller"
        assert "ports" not in SERVICES[name]
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in published)
    (exposed,) = [line.split()[1:] for line in IMAGE if line.startswith("EXPOSE ")]
    assert published[0].split(":")[1] in exposed


def test_the_state_belongs_to_the_user_of_the_image(monkeypatch):
    state = settings_of("controller", monkeypatch).state_directory
    (user,) = [line.split()[1] for line in IMAGE if line.startswith("USER ")]
    assert f"COPY --from=dependencies --chown={user} /state {state}" in IMAGE
    for name in SETTINGS:
        assert f"state:{state}" in SERVICES[name]["volumes"]
    assert f"state:{state}:ro" in SERVICES["prometheus"]["volumes"]


def test_what_is_mounted_and_built_from_is_there():
    declared = set(COMPOSE["volumes"])
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (
                source in declared
                or source == "${PWD}"
                or (source.startswith(".") and (FOLDER / source).exists())
            ), volume
    build = SERVICES["controller"]["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).exists()
    target = target_of("local")
    assert (build["target"], build["args"]) == (target["target"], target["args"])
    assert SERVICES["transferqueue"]["image"] == SERVICES["controller"]["image"]
    assert set(COMPOSE["secrets"]) == set(SERVICES["controller"]["secrets"])
    gpus = yaml.safe_load((FOLDER / "gpus.yaml").read_text())
    assert set(gpus["services"]) <= set(SERVICES)


def test_grafana_shows_the_dashboards_of_the_chart_from_that_prometheus():
    mounted = dict(volume.split(":")[:2] for volume in SERVICES["grafana"]["volumes"])
    folder = mounted["../helm/slipstream/files/dashboards"]
    (provider,) = yaml.safe_load((FOLDER / "grafana" / "dashboards.yaml").read_text())["providers"]
    assert provider["options"]["path"] == folder
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    dashboards = {
        path.name: json.loads(text) for path, text in files().items() if path.suffix == ".json"
    }
    assert home.parent == Path(folder)
    assert home.name in dashboards
    source = yaml.safe_load((FOLDER / "grafana" / "datasource.yaml").read_text())["datasources"][0]
    assert source["url"] == "http://controller:9090"
    assert source["type"] == "prometheus"


def test_prometheus_accepts_its_configuration():
    (promtool,) = require("promtool")
    command = [promtool, "check", "config", "--syntax-only", FOLDER / "prometheus.yaml"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
