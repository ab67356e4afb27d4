"""The file of API keys: what it may say, and what is wrong with one that cannot be used."""

from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from quire.config.serve import AccessConfig
from quire.contracts.errors import ConfigError
from quire.entry.http.access.key_file import read_keys
from quire.entry.http.access.keyring import Keyring

DIGEST = sha256(b"sk-b").hexdigest()
TOML = f"""
[defaults]
requests_per_minute = 10
[keys.alice]
key = "sk-a"
tokens_per_minute = 100
priority = 3
[keys.bob]
sha256 = "{DIGEST}"
requests_per_minute = 20
models = ["base", "sql-*"]
"""


def write(folder: Path, text: str, name: str = "keys.toml") -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    found = read_keys(write(tmp_path, TOML), by_priority=True)
    assert [found[name].requests_per_minute for name in ("alice", "bob")] == [10, 20]
    alice, bob = found.values()
    assert [rules.digests for rules in (alice, bob)] == [[sha256(b"sk-a").digest()], [sha256(b"sk-b").digest()]]
    assert [bob.may_use(name) for name in ("base", "sql-7", "other")] == [True, True, False] and alice.may_use("other")
    assert [alice.priority_of(asked) for asked in (None, 5, -5)] == [3, 5, 3]  # never more urgent than its key
    assert [bob.priority_of(asked) for asked in (None, 5, -5)] == [0, 5, -5]
    text = msgspec.json.encode({"keys": {name: msgspec.to_builtins(rules) for name, rules in found.items()}}).decode()
    assert read_keys(write(tmp_path, text, "keys.json"), by_priority=True) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("keys = 3", "is no file of keys in TOML"),
        ("[keys", "is no file of keys in TOML"),
        ("[keys]", "has 0 keys"),
        ("[keys.a]", "key 'a': give key or sha256"),
        ("[keys.a]\nkey = []", "key 'a': give key or sha256"),
        ('[keys.a]\nkey = ["x", ""]', "key 'a': a key must be printable ASCII without spaces around it, and not empty"),
        (f'[keys.a]\nkey = "sk-b"\n[keys.b]\nsha256 = ["{DIGEST}"]', "'a' and 'b' have the same key"),
        ('[keys.a]\nkey = " x"', "key 'a': a key must be printable ASCII"),
        ('[keys.a]\nsha256 = "AB"', "key 'a': sha256 must be 64"),
        ('[keys.a]\nkey = "x"\nconcurrency = 0', "key 'a': concurrency=0: must be at least 1"),
        ('[keys.a]\nkey = "x"\nqueue_timeout = 0', "key 'a': queue_timeout=0.0: must be above 0"),
        ('[keys.a]\nkey = "x"\nweight = inf', "key 'a': weight=inf: must be above 0 and finite"),
        ('[defaults]\nkey = "x"\n[keys.a]', "key in the defaults would be the same for all names"),
        ('[keys.a]\nkey = "x"\nrequests_per_minut = 9', "requests_per_minut"),
        ('[keys.a]\nkey = "x"\npriority = 1', "key 'a': priority needs --scheduling-policy priority"),
        ('[keys."a b"]\nkey = "x"', "a name has 1 to 64 letters"),
        ('[keys.a]\nkey = "x"\n[keys.b]\nkey = "x"', "'a' and 'b' have the same key"),
    ],
)
def test_a_file_that_cannot_work_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("[", r"\[")):
        read_keys(write(tmp_path, text), by_priority=False)


def test_a_name_may_have_several_keys_while_clients_move(tmp_path: Path) -> None:
    file = write(tmp_path, f'[keys.a]\nkey = ["sk-a", "sk-new"]\nsha256 = "{DIGEST}"')
    ring = Keyring(AccessConfig(api_key_file=str(file)), by_priority=False)
    callers = [ring.find([key]) for key in (b"sk-a", b"sk-new", b"sk-b")]
    assert callers[0] is not None and callers[0].name == "a" and callers == callers[:1] * 3


def test_a_missing_file_and_one_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_keys(tmp_path / "none.toml", by_priority=False)
    with pytest.raises(ConfigError, match=r"a TOML file is named \*\.toml"):
        read_keys(write(tmp_path, TOML, "keys"), by_priority=False)


def test_a_bad_file_keeps_the_keys_and_a_good_one_replaces_them(tmp_path: Path) -> None:
    path = write(tmp_path, TOML)
    ring = Keyring(AccessConfig(api_key=("sk-flag",), api_key_file=str(path)), by_priority=True)
    names = [caller.name for key in (b"sk-a", b"sk-b", b"sk-flag") if (caller := ring.find([key]))]
    assert names == ["alice", "bob", ""] and ring.find([b"sk-c", b""]) is None
    first = ring.find([b"no", b"sk-a"])
    write(tmp_path, "[keys.alice]")
    with pytest.raises(ConfigError, match="stay as they were: .*give key or sha256"):
        ring.reload()
    assert ring.find([b"sk-a"]) == first is not None
    write(tmp_path, '[keys.alice]\nkey = "sk-new"')
    assert ring.reload() == f"1 API keys are read again from {path}."
    later = ring.find([b"sk-new"])
    assert ring.find([b"sk-a"]) is None and ring.find([b"sk-flag"]) is not None
    assert later is not None and (later.owner, later.tenant) == (first.owner, first.tenant), (
        "a new key of the same name"
    )
    write(tmp_path, '[keys.alice]\nkey = "sk-flag"')
    with pytest.raises(ConfigError, match="with --api-key, too"):
        ring.reload()


def test_readable_keys_are_told_and_digests_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for text, told in ((TOML, True), (f'[keys.b]\nsha256 = "{DIGEST}"', False)):
        caplog.clear()
        write(tmp_path, text).chmod(0o644)
        Keyring(AccessConfig(api_key_file=str(tmp_path / "keys.toml")), by_priority=True)
        assert ("other users may read" in caplog.text) == told
