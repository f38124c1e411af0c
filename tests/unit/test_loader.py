"""The precedence and the origins of settings, and the errors for wrong settings."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from node.config.loader import Loaded, known_keys, load, nearest, settings_as_variables
from node.config.schema import Config
from node.errors import ConfigError

STEPS = "run.round.inner_steps"
STEPS_ENV = "DILOCO_RUN__ROUND__INNER_STEPS"


def loaded(file: Path | None = None, environ: Mapping[str, str] | None = None, flags: Sequence[str] = ()) -> Loaded:
    return load(file=file, environ=environ or {}, flags=flags)


def written(folder: Path, text: str, name: str = "mine.toml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def error(file: Path | None = None, environ: Mapping[str, str] | None = None, flags: Sequence[str] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(file, environ, flags)
    return str(caught.value)


def test_later_configuration_sources_override_earlier_ones_and_are_named(tmp_path: Path) -> None:
    preset = written(tmp_path, "[run.round]\ninner_steps = 2\n", "preset.toml")
    file = written(tmp_path, f"[run]\npreset = '{preset}'\n[run.round]\ninner_steps = 3\n")
    environ, flags = {STEPS_ENV: "4"}, [f"--{STEPS}", "5"]
    starts = [
        (loaded(flags=["--run.preset", str(preset)]), 2, f"preset {preset}"),
        (loaded(file), 3, f"file {file}"),
        (loaded(file, environ), 4, f"environment variable {STEPS_ENV}"),
        (loaded(file, environ, flags), 5, f"flag --{STEPS}"),
    ]
    for start, steps, origin in starts:
        assert start.config.run.round.inner_steps == steps
        assert start.origins[STEPS] == origin
        assert start.preset == str(preset)
        assert start.origins["api.port"] == "default"


def test_fault_plan_in_the_environment_is_not_a_setting() -> None:
    assert loaded(environ={"DILOCO_FAULTS": "reduce@1=hang"}) == loaded()


def test_every_configuration_key_has_a_value_and_an_origin() -> None:
    start = loaded()
    assert set(start.origins) == set(known_keys())
    for key in known_keys():
        start.value_of(key)


def test_flag_and_environment_variable_are_equivalent() -> None:
    configs = [loaded(flags=[f"--{STEPS}", "20"]), loaded(flags=[f"--{STEPS}=20"]), loaded(environ={STEPS_ENV: "20"})]
    assert [start.config for start in configs] == 3 * [configs[0].config]
    assert configs[0].config.run.round.inner_steps == 20
    assert loaded(flags=["--api.port=1", "--api.port=2"]).config.api.port == 2, "the last flag wins"


def test_list_settings_are_written_in_toml_or_separated_by_commas(tmp_path: Path) -> None:
    both = ("/ip4/1.2.3.4/tcp/1", "/ip4/5.6.7.8/tcp/2")
    file = written(tmp_path, f"[swarm]\nlisten = {list(both)}\nannounce = '{both[0]}'\n")
    assert loaded(file).config.swarm.listen == both
    assert loaded(file).config.swarm.announce == both[:1]
    assert loaded(environ={"DILOCO_SWARM__LISTEN": " , ".join(both)}).config.swarm.listen == both
    assert loaded(flags=["--swarm.listen", ",".join(both)]).config.swarm.listen == both
    assert loaded(file, flags=["--swarm.listen=", "--swarm.announce="]).config.swarm.listen == ()
    assert loaded(flags=["--swarm.listen", "[]"]).config.swarm.listen == ()


def test_texts_with_commas_are_given_as_json() -> None:
    prompts = ("Once upon a time, there", "second")
    start = loaded(flags=["--run.sample.prompts", json.dumps(prompts)])
    assert start.config.run.sample.prompts == prompts
    assert loaded(environ=settings_as_variables(start)).config.run.sample.prompts == prompts
    spaced = loaded(flags=["--run.sample.prompts", '["The ", "def main("]'])
    assert loaded(environ=settings_as_variables(spaced)).config.run.sample.prompts == ("The ", "def main(")
    assert loaded(flags=["--run.sample.prompts", "one,two"]).config.run.sample.prompts == ("one", "two")


def test_plain_hosts_and_ports_in_settings_become_multiaddresses() -> None:
    flags = ["--swarm.bootstrap=peer:1,[::1]:2", "--swarm.announce=1.2.3.4,example.org:5,2001:db8::1"]
    swarm = loaded(flags=flags).config.swarm
    assert swarm.bootstrap == ("/dns4/peer/tcp/1", "/ip6/::1/tcp/2")
    assert swarm.announce == ("/ip4/1.2.3.4/tcp/0", "/dns4/example.org/tcp/5", "/ip6/2001:db8::1/tcp/0")
    assert Config.model_validate({"swarm": swarm.model_dump()}).swarm == swarm


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("listen", "foo", "write one such as /ip4/"),
        ("listen", "0.0.0.0:31337", "write one such as /ip4/"),
        ("listen", "/ip4/0.0.0.0/udp/31337/quic-v1", "a TCP port, such as /ip4/"),
        ("listen", "/dns4/example.org/tcp/1", "an IP address of this machine"),
        ("listen", "/ip4/0.0.0.0/tcp/1,/ip4/127.0.0.1/tcp/1", "leave it out"),
        ("announce", "foo", "write HOST, HOST:PORT or a multiaddress"),
        ("announce", "0.0.0.0:5", "name the address that they see"),
        ("announce", "/ip4/1.2.3.4/udp/5/quic-v1", "write /ip4/1.2.3.4/tcp/5"),
        ("bootstrap", "foo", "write HOST:PORT or a multiaddress"),
        ("bootstrap", "1.2.3.4", "write HOST:PORT or a multiaddress"),
        ("bootstrap", "1.2.3.4:0", "name the peer's own address and port"),
        ("bootstrap", "/ip4/1.2.3.4/tcp/1/p2p/Qm", "copy the whole address again"),
    ],
)
def test_malformed_address_in_a_setting_is_refused_with_the_remedy(key: str, value: str, remedy: str) -> None:
    message = error(flags=[f"--swarm.{key}={value}"])
    assert f"swarm.{key} = " in message and remedy in message and message.endswith(".")


@pytest.mark.parametrize(
    ("flags", "announces"), [(["--swarm.announce=1.2.3.4:5"], True), (["--swarm.announce=1.2.3.4"], False), ([], False)]
)
def test_announced_address_announces_a_port_only_if_it_names_one(flags: list[str], announces: bool) -> None:
    assert loaded(flags=flags).config.swarm.announces_port is announces


@pytest.mark.parametrize(
    ("flag", "problem"),
    [
        (f"--limits.cpu_threads={2**70}", "less than or equal to 4096"),
        ("--devices.micro_batch=1000000", "less than or equal to 65536"),
        ("--limits.upload_mbit_s=1e9", "less than or equal to 1000000"),
        ("--checkpoint.keep=5000", "less than or equal to 1000"),
        ("--node.name=red\x1b[31m", "no control characters"),
        ("--node.name=two\nlines", "no control characters"),
        ("--run.name=red\x1b[31m", "no control characters"),
        ("--run.purpose=red\x1b[31m", "run.purpose has a control character"),
    ],
)
def test_value_without_any_sense_is_refused(flag: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(file=None, environ={}, flags=[flag])


def test_announcing_an_address_without_a_listen_address_is_refused() -> None:
    assert "leave announce empty" in error(flags=["--swarm.listen=", "--swarm.announce=1.2.3.4"])


@pytest.mark.parametrize(("word", "value"), [("true", True), ("false", False), ("1", True), ("no", False)])
def test_boolean_settings_are_parsed_from_words(word: str, value: bool) -> None:
    assert loaded(flags=["--swarm.relay", word]).config.swarm.relay is value
    assert loaded(environ={"DILOCO_SWARM__RELAY": word}).config.swarm.relay is value


def test_a_boolean_flag_needs_no_value() -> None:
    start = loaded(flags=["--api.metrics_public", "--api.port", "9"])
    assert start.config.api.metrics_public is True
    assert start.config.api.port == 9


def test_default_data_folder_is_in_the_home_folder_and_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert loaded(environ={"HOME": "/home/x"}).config.node.data_dir == Path("/home/x/.local/share/diloco-node")
    assert loaded(flags=["--node.data_dir", "here"]).config.node.data_dir == tmp_path / "here"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("--run.round.inner_step", "--run.round.inner_steps"),
        ("--run.inner_steps", "--run.round.inner_steps"),
        ("--log_level", "--log.level"),
        ("--api.prot", "--api.port"),
        ("--run.round", ""),
    ],
)
def test_error_for_an_unknown_flag_names_the_nearest_one(wrong: str, right: str) -> None:
    message = error(flags=[wrong, "5"])
    assert f"Unknown flag {wrong}:" in message
    assert message.endswith(f"{right}.") or not right


@pytest.mark.parametrize(
    "variable", ["DILOCO_RUN__ROUND__INNER_STEP", "DILOCO_RNU__ROUND__INNER_STEPS", "DILOCO_INNER_STEPS"]
)
def test_error_for_an_unknown_environment_variable_names_the_nearest_one(variable: str) -> None:
    message = error(environ={variable: "5", "PATH": "/bin", "NOT_DILOCO_X": "1"})
    assert variable in message
    assert message.endswith(f" {STEPS_ENV}.")


@pytest.mark.parametrize(
    ("text", "wrong", "right"),
    [
        ("[run.round]\ninner_step = 5\n", "run.round.inner_step", STEPS),
        ("[rnu.round]\ninner_steps = 5\n", "rnu.round.inner_steps", STEPS),
        ("port = 5\n", "port", "api.port"),
        ("[limits]\n[limit]\n", "limit", ""),
    ],
)
def test_error_for_an_unknown_key_in_a_file_names_the_file_and_the_nearest_key(
    tmp_path: Path, text: str, wrong: str, right: str
) -> None:
    file = written(tmp_path, text)
    message = error(file)
    assert f"Unknown key {wrong} in file {file}:" in message
    assert message.endswith(f" {right}.") or not right


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("api.port", "70000", "65535"),
        ("api.port", "many", "integer"),
        ("log.level", "loud", "'debug', 'info', 'warning' or 'error'"),
        ("run.inner.lr", "0", "greater than 0"),
        ("run.inner.lr", "inf", "finite"),
        ("run.inner.lr", "nan", "greater than 0"),
        ("swarm.relay", "perhaps", "boolean"),
        ("run.sync.codec", "int3", "'fp32'"),
        ("limits.upload_mbit_s", "1", "less than 2 Mbit/s"),
        ("limits.disk_gb", "0.001", "at least 0.023"),
    ],
)
def test_error_for_a_bad_value_names_key_value_source_and_what_is_allowed(key: str, value: str, allowed: str) -> None:
    variable = "DILOCO_" + key.replace(".", "__").upper()
    for message, source in (
        (error(flags=[f"--{key}", value]), f"flag --{key}"),
        (error(environ={variable: value}), f"environment variable {variable}"),
    ):
        for part in (key, repr(value), source, allowed):
            assert part in message


@pytest.mark.parametrize("line", ["port = true", "port = 'x'", "port = [1]", "port = {a = 1}"])
def test_error_for_a_bad_value_in_a_file_names_the_key_and_the_file(tmp_path: Path, line: str) -> None:
    file = written(tmp_path, f"[api]\n{line}\n")
    message = error(file)
    assert "api.port = " in message
    assert str(file) in message


def test_a_bad_value_is_an_error_even_if_a_later_source_overrides_it() -> None:
    assert "'many'" in error(environ={"DILOCO_API__PORT": "many"}, flags=["--api.port", "1"])


def test_error_for_contradicting_values_names_them_and_their_origins() -> None:
    message = error(environ={"DILOCO_RUN__INNER__SEQUENCE_LENGTH": "99999"})
    assert "run.inner.sequence_length from environment variable DILOCO_RUN__INNER__SEQUENCE_LENGTH" in message
    assert "run.model.max_position_embeddings from " in message
    message = error(flags=["--run.model.num_attention_heads=3"])
    assert "run.model.num_attention_heads from flag --run.model.num_attention_heads" in message


def test_flag_without_a_value_and_value_without_a_flag_are_refused() -> None:
    assert "--api.port VALUE" in error(flags=["--api.port"])
    assert "--api.port VALUE" in error(flags=["--api.port", "--swarm.relay"])
    assert "belongs to no flag" in error(flags=["--api.port", "1", "2"])


def test_unusable_configuration_files_are_refused_with_a_reason(tmp_path: Path) -> None:
    assert "No such file" in error(tmp_path / "none.toml")
    assert "not valid TOML" in error(written(tmp_path, "[run\n"))
    assert "write [run.round]" in error(written(tmp_path, "[run]\nround = 5\n"))


def test_a_preset_path_is_relative_to_the_file_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    written(tmp_path / "sub", "[run]\nname = 'tiny'\n", "tiny.toml")
    file = written(tmp_path / "sub", "[run]\npreset = 'tiny.toml'\n")
    monkeypatch.chdir(tmp_path)
    assert loaded(file).config.run.name == "tiny"
    assert loaded(flags=["--run.preset", f"sub{os.sep}tiny.toml"]).config.run.name == "tiny"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[api]\nport = 1\n", "only [run] tables"),
        ("[run]\npreset = 'builtin'\n", "preset inside a preset"),
        ("[run.round]\ninner_step = 5\n", "Unknown key run.round.inner_step in preset "),
    ],
)
def test_a_preset_holds_only_known_keys_of_the_run(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in error(flags=["--run.preset", str(written(tmp_path, text))])


def test_error_for_an_unknown_preset_names_the_shipped_ones() -> None:
    message = error(flags=["--run.preset", "bulitin"])
    assert "'bulitin'" in message and "builtin" in message


def test_suggested_key_shares_the_name_of_the_unknown_key_rather_than_its_section() -> None:
    assert nearest("inner.momentum", known_keys()) == "run.outer.momentum"


def test_phases_come_from_tables_of_a_file_or_from_json_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(
        "[[run.phases]]\nfrom_tokens = 500\nlr_ratio = 0.5\n[[run.phases]]\nfrom_tokens = 900\nlr_ratio = 0.1\n"
    )
    of_file = load(file=file, environ={}, flags=[]).config.run
    assert [(phase.from_tokens, phase.lr_ratio) for phase in of_file.phases] == [(500, 0.5), (900, 0.1)]
    text = '[{"from_tokens": 500, "lr_ratio": 0.5}, {"from_tokens": 900, "lr_ratio": 0.1}]'
    assert load(file=None, environ={}, flags=["--run.phases", text]).config.run == of_file
    assert load(file=None, environ={"DILOCO_RUN__PHASES": text}, flags=[]).config.run == of_file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"from_tokens": "x"}]', "from_tokens of a table: should be a valid integer"),
        ('[{"lr_ratio": 2}]', "from_tokens of a table: Field required"),
        ('[{"from_tokens"', "run.phases"),
        ('[{"from_tokens": 5}]', "changes nothing"),
    ],
)
def test_false_phases_are_refused_with_the_place_of_the_fault(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(file=None, environ={}, flags=["--run.phases", text])


def test_variables_of_services_that_kubernetes_adds_are_ignored() -> None:
    added = {
        "DILOCO_SERVICE_HOST": "10.0.0.7", "DILOCO_SERVICE_PORT": "31337", "DILOCO_SERVICE_PORT_P2P": "31337",
        "DILOCO_PORT": "tcp://10.0.0.7:31337", "DILOCO_PORT_31337_TCP": "tcp://10.0.0.7:31337",
        "DILOCO_PORT_31337_TCP_PROTO": "tcp", "DILOCO_NODE_SERVICE_HOST": "10.0.0.8",
        "DILOCO_NODE_PORT_8080_TCP_ADDR": "10.0.0.8",
    }  # fmt: skip
    assert loaded(environ=added) == loaded()
    assert "DILOCO_PORT" in error(environ={"DILOCO_PORT": "8080"}), "a mistake is named as before"


def test_model_folder_keeps_its_meaning_in_another_working_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = settings_as_variables(loaded(flags=["--run.model.start", "./model"]))
    assert variables["DILOCO_RUN__MODEL__START"] == str(Path("model").absolute())
    variables = settings_as_variables(loaded(flags=["--run.model.start", "hub:own/model"]))
    assert variables["DILOCO_RUN__MODEL__START"] == "hub:own/model"


def test_empty_data_folder_is_refused() -> None:
    assert "should name a folder" in error(environ={"DILOCO_NODE__DATA_DIR": ""})
    assert loaded(flags=["--node.data_dir", "."]).config.node.data_dir == Path.cwd()


@pytest.mark.parametrize("key", ["data_dir", "text_dir"])
def test_folder_that_is_a_symbolic_link_in_a_loop_is_refused(tmp_path: Path, key: str) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(ConfigError, match="symbolic link in a loop: name another one"):
        load(file=None, environ={}, flags=[f"--node.{key}", str(loop)])


@pytest.mark.parametrize("text_dir", [".", "", "..", "/d", "/"])
def test_folder_of_text_that_contains_the_data_folder_is_refused(text_dir: str) -> None:
    """A run's sources name files in it, so a run could train on the token of the API."""
    flags = ["--node.data_dir", "/d/a", f"--node.text_dir={text_dir}"]
    assert "a run could read this node's token" in error(flags=flags)


def test_relative_paths_of_a_file_are_absolute_for_a_service(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('[publish]\nto = "pub"\n[api]\ntls_cert = "cert.pem"\ntls_key = "/key.pem"\n[node]\nname = "a"\n')
    assert settings_as_variables(load(file=file, environ={"HOME": str(tmp_path)}, flags=[]), file) == {
        "DILOCO_PUBLISH__TO": str(Path("pub").absolute()),
        "DILOCO_API__TLS_CERT": str(Path("cert.pem").absolute()),
    }
