"""`headrace init`: what it leaves on the disk."""

from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509

from headrace_cli.certificates import RENEWAL_DAYS, is_good, new_authority, new_certificate, utc_now
from headrace_cli.commands import run
from headrace_cli.init_command import InitSettings, make_secrets
from headrace_shared.broker_credentials import key_path
from headrace_shared.broker_permissions import Role
from headrace_shared.errors import ConfigError
from headrace_shared.nkeys import new_seed, public_key_of, sign
from headrace_shared.secret_files import ensure_private_folder, write_secret


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_each_service_has_a_folder_that_only_the_owner_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "secrets"
    assert run(["init", "--dir", str(folder), "--tls", "--cluster", "a,b,c"]) == 0
    for path in (folder, *folder.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    for role in Role:
        assert {path.name for path in (folder / role).iterdir()} == {"user.nk", "ca.pem"}
    made = contents(folder)
    secret_words = [made[f"{role}/user.nk"].strip() for role in Role] + [made["broker/route-password"].strip()]
    assert len(set(secret_words)) == len(Role) + 1
    printed = "".join(capsys.readouterr())
    for word in secret_words:
        assert word not in printed
        holders = [name for name, content in made.items() if word in content]
        assert len(holders) == 1 or holders == ["broker/cluster.conf", "broker/route-password"]
    assert "PRIVATE KEY" in made["ca/ca-key.pem"] and "PRIVATE KEY" not in made["router/ca.pem"]


def test_what_is_there_is_kept_and_what_is_missing_is_made(tmp_path: Path) -> None:
    settings = InitSettings(tls=True, cluster=("a", "b"))
    make_secrets(tmp_path, settings)
    before = contents(tmp_path)
    make_secrets(tmp_path, settings)
    assert contents(tmp_path) == before
    key_path(tmp_path, Role.WORKER).unlink()
    make_secrets(tmp_path, settings)
    after = contents(tmp_path)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"worker/user.nk", "broker/access.conf"}


def test_everything_is_replaced_on_demand_only(tmp_path: Path) -> None:
    settings = InitSettings(tls=True, cluster=("a", "b"))
    make_secrets(tmp_path, settings)
    before = contents(tmp_path)
    make_secrets(tmp_path, InitSettings(tls=True, cluster=("a", "b"), rotate=True))
    after = contents(tmp_path)
    assert after.keys() == before.keys()
    assert [name for name in after if after[name] == before[name]] == []


def test_an_old_version_s_list_of_rights_is_written_again(tmp_path: Path) -> None:
    make_secrets(tmp_path, InitSettings())
    wanted = (tmp_path / "broker/access.conf").read_text()
    (tmp_path / "broker/access.conf").write_text("authorization {}")
    make_secrets(tmp_path, InitSettings())
    assert (tmp_path / "broker/access.conf").read_text() == wanted
    assert "tls" not in wanted


def test_a_certificate_is_renewed_in_time_and_for_other_hosts() -> None:
    now = utc_now()
    authority = new_authority(now)
    certificate = new_certificate(authority, ("nats", "10.0.0.1"), now).certificate
    assert is_good(certificate, authority.certificate, ("10.0.0.1", "nats"), now)
    assert not is_good(certificate, authority.certificate, ("nats",), now)
    assert not is_good(certificate, new_authority(now).certificate, ("nats", "10.0.0.1"), now)
    assert not is_good(authority.certificate, authority.certificate, ("nats", "10.0.0.1"), now)  # it names no host
    left = x509.load_pem_x509_certificate(certificate.encode()).not_valid_after_utc - timedelta(days=RENEWAL_DAYS - 1)
    assert not is_good(certificate, authority.certificate, ("nats", "10.0.0.1"), left)


def test_a_folder_that_others_read_is_closed_and_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    ensure_private_folder(tmp_path / "open")
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(tmp_path / "open")
    with pytest.raises(ConfigError, match="link"):
        ensure_private_folder(tmp_path / "link")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make"):
        ensure_private_folder(tmp_path / "file" / "below")
    with pytest.raises(ConfigError, match="cannot write"):
        write_secret(tmp_path / "nowhere" / "x", "secret")


def test_a_secret_replaces_a_link_and_not_what_it_leads_to(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "x").symlink_to(target)
    write_secret(tmp_path / "x", "secret")
    assert target.read_text() == "precious" and not (tmp_path / "x").is_symlink()


@pytest.mark.parametrize("hosts", ["a b", "x,", "nats;DROP", '"'])
def test_hosts_are_names_and_addresses(tmp_path: Path, hosts: str, capsys: pytest.CaptureFixture[str]) -> None:
    if hosts == "x,":
        assert run(["init", "--dir", str(tmp_path / "s"), "--hosts", hosts]) == 0
        return
    assert run(["init", "--dir", str(tmp_path / "s"), "--hosts", hosts]) == 2
    assert "hosts" in capsys.readouterr().err


def test_keys_are_what_other_programs_of_the_broker_take() -> None:
    """A pair from the broker's own documentation, and what damages a seed."""
    documented = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY"
    assert public_key_of(documented) == "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"
    seed = new_seed()
    assert seed.startswith("SU") and len(seed) == 58
    public = public_key_of(seed)
    assert public.startswith("U") and len(public) == 56
    assert len(sign(seed, b"nonce")) == 64 and public_key_of(f" {seed}\n") == public
    other = "A" if seed[20] != "A" else "B"
    for broken in ("", "SU", public, seed[:-1], seed[:20] + other + seed[21:], "é" * 58, "SA" + seed[2:], seed.lower()):
        with pytest.raises(ValueError, match="nkey"):
            public_key_of(broken)
