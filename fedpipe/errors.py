"""Errors that are for people: one sentence that names the setting or file, what it is, and what would be right."""


class UserError(Exception):
    """A mistake that the user can mend; the command line prints it without a traceback and exits with status 2."""


class SettingsError(UserError, ValueError):
    """A setting of params.yaml is unknown, of the wrong type, or impossible."""


class ArtifactError(UserError):
    """A stored file is missing, damaged, or not what its manifest says."""
