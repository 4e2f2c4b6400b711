"""`lockstep roster`: keeps a roster for workers that share no folder."""

import signal

import click

from lockstep.settings.environment import process_environment, read_secret


@click.command(name="roster")
@click.option("--listen", metavar="HOST:PORT", default="0.0.0.0:29400", show_default=True, help="Where to listen.")
def command(listen: str) -> None:
    """Keep a roster, at which workers on other hosts find the members of a run, until it is ended by Ctrl-C.

    Workers find it by LOCKSTEP_ROSTER=tcp://HOST:PORT. It knows the secret of the run from LOCKSTEP_SECRET or
    LOCKSTEP_SECRET_FILE, as the workers do, and answers nobody else. It forgets all when it ends: members write
    themselves down again within seconds where it is started anew.
    """
    from lockstep.elastic.roster.tcp import RosterServer

    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise click.BadParameter(f"{listen} is no address: it looks like 0.0.0.0:29400", param_hint="--listen")
    secret = read_secret(process_environment())
    if not secret:
        raise click.UsageError(
            "a roster needs the secret of the run: set LOCKSTEP_SECRET_FILE to a file that only you can read, here and "
            "for every worker. python -c 'import secrets; print(secrets.token_hex(32))' > FILE makes one"
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server = RosterServer(host, int(port), secret)
    except OSError as error:
        raise click.ClickException(f"nobody can listen at {listen}: {error.strerror}") from error
    click.echo(f"the roster is kept at tcp://{host}:{server.port}")
    try:
        signal.pause()
    except KeyboardInterrupt:
        server.close()
