"""Settings of the command line."""

from pydantic_settings import BaseSettings, SettingsConfigDict


class CliSettings(BaseSettings):
    """Settings of the ``slipstream`` command from the environment."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_", extra="ignore")

    token: str = ""
    """API token, if the controller requires one."""
    url: str = ""
    """REST address of a controller. Default: the controller that ``slipstream up`` started here."""
