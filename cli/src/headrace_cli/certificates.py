"""A certificate authority of our own, and the broker's certificate. Keys are ECDSA on P-256."""

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 397
RENEWAL_DAYS = 90
"""With less left a certificate is made anew."""
_CLOCK_SKEW = timedelta(hours=1)


class Pair(NamedTuple):
    """PEM."""

    key: str
    certificate: str


def new_authority(now: datetime) -> Pair:
    """It signs certificates of servers and no further authorities."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("Headrace broker authority")
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    usage = _usage(signs_certificates=True)
    certificate = (
        _builder(name, name, key.public_key(), now, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _pair(key, certificate)


def new_certificate(authority: Pair, hosts: Sequence[str], now: datetime) -> Pair:
    """For a broker at these names and addresses; also for what it says to other brokers of a cluster. Raises
    ValueError."""
    signer = x509.load_pem_x509_certificate(authority.certificate.encode())
    signing_key = serialization.load_pem_private_key(authority.key.encode(), None)
    if not isinstance(signing_key, ec.EllipticCurvePrivateKey):
        raise ValueError("the authority's key is not of the kind that we make")
    key = ec.generate_private_key(ec.SECP256R1())
    identifier = x509.SubjectKeyIdentifier.from_public_key(signing_key.public_key())
    certificate = (
        _builder(_name("Headrace broker"), signer.subject, key.public_key(), now, CERTIFICATE_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(signing_key, hashes.SHA256())
    )
    return _pair(key, certificate)


def is_good(certificate: str, authority: str, hosts: Sequence[str], now: datetime) -> bool:
    """Whether it is signed by this authority, for these hosts, and will be valid for a while. ValueError: one of the
    two is no certificate in PEM."""
    loaded = x509.load_pem_x509_certificate(certificate.encode())
    signer = x509.load_pem_x509_certificate(authority.encode())
    try:
        loaded.verify_directly_issued_by(signer)
        names = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (InvalidSignature, TypeError, ValueError):  # somebody else's signature, or of a kind that ours never has
        return False
    except x509.ExtensionNotFound:  # it names no host
        return False
    wanted = {_general_name(host) for host in hosts}
    return set(names) == wanted and loaded.not_valid_after_utc - now > timedelta(days=RENEWAL_DAYS)


def utc_now() -> datetime:
    return datetime.now(UTC)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=days))
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pair(key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> Pair:
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Pair(private.decode(), certificate.public_bytes(serialization.Encoding.PEM).decode())
