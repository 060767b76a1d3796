"""Certificates made with the openssl program, and a TLS server that tells whether a client accepted it."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading

EXTENSIONS = """
[ca]
basicConstraints = critical,CA:TRUE
keyUsage = critical,keyCertSign,cRLSign
[localhost]
subjectAltName = DNS:localhost
[loopback]
subjectAltName = IP:127.0.0.1
[client]
subjectAltName = DNS:client
"""


class Authority:
    """A certificate authority in a directory of its own."""

    def __init__(self, directory):
        self.directory = directory
        directory.mkdir()
        (directory / "extensions").write_text(EXTENSIONS)
        (directory / "index").touch()
        (directory / "openssl.cnf").write_text(
            f"[ca]\ndefault_ca = own\n[own]\ndatabase = {directory}/index\ndefault_md = sha256\ndefault_crl_days = 30\n"
        )
        self._openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=test authority", "-keyout", "ca.key",
                      "-out", "ca.pem", "-addext", "keyUsage=critical,keyCertSign,cRLSign")  # fmt: skip
        self.certificate = directory / "ca.pem"

    def _openssl(self, *arguments):
        subprocess.run(["openssl", *arguments], cwd=self.directory, check=True, capture_output=True, timeout=60)

    def issue(self, name, kind, *, password=None):
        """A certificate and its key, as two PEM files."""
        lock = ["-nodes"] if password is None else ["-passout", f"pass:{password}"]
        self._openssl("req", "-newkey", "rsa:2048", *lock, "-subj", f"/CN={name}", "-keyout", f"{name}.key",
                      "-out", f"{name}.csr")  # fmt: skip
        self._openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                      "-days", "30", "-out", f"{name}.pem", "-extfile", "extensions", "-extensions", kind)  # fmt: skip
        return self.directory / f"{name}.pem", self.directory / f"{name}.key"

    def revocations(self, *certificates):
        """A list of revoked certificates."""
        config = ["-config", "openssl.cnf", "-keyfile", "ca.key", "-cert", "ca.pem"]
        for certificate in certificates:
            self._openssl("ca", *config, "-revoke", str(certificate))
        self._openssl("ca", *config, "-gencrl", "-out", "crl.pem")
        return self.directory / "crl.pem"


class HandshakeServer:
    """Shakes hands with every client, and closes the connection. A client that does not accept the server breaks it off."""

    def __init__(self, certificate, key, *, client_authority=None, ciphers=None):
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        if client_authority is not None:
            self._context.verify_mode = ssl.CERT_REQUIRED
            self._context.load_verify_locations(client_authority)
        if ciphers is not None:
            self._context.maximum_version = ssl.TLSVersion.TLSv1_2
            self._context.set_ciphers(ciphers)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._first = threading.Event()
        self.accepted = None

    def __enter__(self):
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self):
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            plain.settimeout(10)
            try:
                with self._context.wrap_socket(plain, server_side=True) as client:
                    # With TLS 1.3 the client may still refuse, or be refused, after the handshake: its first bytes show it.
                    accepted = len(client.recv(1)) == 1
            except OSError:
                plain.close()
                accepted = False
            if self.accepted is None:
                self.accepted = accepted
            self._first.set()

    def came(self, timeout_s):
        """Whether a client has come; ``accepted`` then shows whether it accepted the certificate."""
        return self._first.wait(timeout_s)
