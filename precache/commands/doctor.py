"""`precache doctor`, which runs where Pillow does not."""

import click

from precache.console.commandline import Command


@click.command(name="doctor", cls=Command)
def doctor_command() -> None:
    """Show what this machine has, and which command installs what is missing."""
    from precache.checks import doctor

    findings = doctor.examine()
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        click.echo(f"{finding.subject:<{width}}  {finding.found}")
        if finding.install:
            click.echo(f"{'':<{width}}  install: {finding.install}")
