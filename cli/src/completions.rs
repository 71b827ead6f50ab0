//! `kolo completions` and `kolo man`: what the command line says of itself, for shells and for `man`.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Command, CommandFactory};
use clap_complete::Shell;

use crate::Cli;

/// Arguments of `kolo completions`.
#[derive(ClapArgs)]
#[command(after_help = "Examples:
  eval \"$(kolo completions bash)\"
      in ~/.bashrc; the same with zsh in ~/.zshrc, after compinit
  kolo completions fish | source
      in ~/.config/fish/config.fish
  kolo completions powershell | Out-String | Invoke-Expression
      in $PROFILE")]
pub(crate) struct Args {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Arguments of `kolo man`.
#[derive(ClapArgs)]
pub(crate) struct ManArgs {
    /// The folder, which is made
    folder: PathBuf,
}

/// Prints the completions of a shell.
pub(crate) fn print(args: &Args) {
    let mut script = Vec::new();
    // Scripts complete hidden commands, too.
    let shown = Cli::command().get_subcommands().filter(|command| !command.is_hide_set()).cloned().collect::<Vec<_>>();
    let mut command = Command::new("kolo").version(env!("CARGO_PKG_VERSION")).propagate_version(true).subcommands(shown);
    clap_complete::generate(args.shell, &mut command, "kolo", &mut script);
    crate::print(&script);
}

/// Writes a man page of each command that the help lists.
pub(crate) fn write_pages(args: &ManArgs) -> Result<(), String> {
    let folder = &args.folder;
    let written = std::fs::create_dir_all(folder)
        .and_then(|()| clap_mangen::generate_to(Cli::command().disable_help_subcommand(true), folder));
    written.map_err(|error| format!("{}: {error}", folder.display()))
}
