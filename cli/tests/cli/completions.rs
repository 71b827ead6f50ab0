//! `kolo completions` and `kolo man`: what shells and `man` make of them.

use std::path::Path;
use std::process::Command;

use crate::common::not_run;
use crate::program::{Folder, said, text};

/// Runs a command, and returns what it wrote. `None` if it is not installed, which is said.
fn output(command: &mut Command) -> Option<String> {
    match command.output() {
        Ok(output) => {
            let written = text(&output.stdout) + &text(&output.stderr);
            assert!(output.status.success(), "{command:?}: {}: {written}", output.status);
            Some(written)
        }
        Err(_) => {
            not_run(&format!("{} is not installed", command.get_program().to_string_lossy()));
            None
        }
    }
}

/// `PATH` with the folder of the program in front.
fn path() -> String {
    let folder = Path::new(env!("CARGO_BIN_EXE_kolo")).parent().unwrap().display();
    format!("{folder}:{}", std::env::var("PATH").unwrap_or_default())
}

#[test]
fn scripts_have_the_commands_that_the_help_lists() {
    let help = said(&["--help"]);
    let help = help.split_once("Commands:").unwrap().1;
    for shell in ["bash", "zsh", "fish", "powershell"] {
        let script = said(&["completions", shell]);
        for command in ["run", "bench", "plan", "soak", "doctor", "trace", "top", "compare", "completions", "help"] {
            assert!(help.contains(&format!("  {command}")) && script.contains(command), "{shell}: {command}");
        }
        for hidden in ["compete", "guard", "agent"] {
            assert!(!script.contains(hidden), "{shell}: {hidden}");
        }
    }
}

#[test]
fn shells_read_their_scripts() {
    let folder = Folder::new("scripts");
    for shell in ["bash", "zsh", "fish"] {
        let script = folder.0.join(shell);
        std::fs::write(&script, said(&["completions", shell])).unwrap();
        output(Command::new(shell).arg("-n").arg(&script));
    }
    let ask = "kolo completions powershell | Out-String | Invoke-Expression; \
               (TabExpansion2 'kolo ben' 8).CompletionMatches.CompletionText";
    let mut command = Command::new("pwsh");
    if let Some(found) = output(command.args(["-NoProfile", "-NonInteractive", "-Command", ask]).env("PATH", path())) {
        assert_eq!(found.trim(), "bench");
    }
}

/// With the files that packages install: a tab completes commands, options, values and the program of
/// `kolo run`.
#[cfg(target_os = "linux")]
#[test]
fn shells_complete_what_is_typed() {
    let files = Path::new(env!("CARGO_MANIFEST_DIR")).join("completions");
    let folder = Folder::new("completions");
    let bash = format!("PS1='# '; bind 'set bell-style none'; . {}/kolo\n", files.display());
    std::fs::write(folder.0.join("bashrc"), bash).unwrap();
    let zsh = format!("PS1='# '; unsetopt beep; fpath=({} $fpath); autoload -Uz compinit; compinit -u\n", files.display());
    std::fs::write(folder.0.join(".zshrc"), zsh).unwrap();
    std::fs::create_dir_all(folder.0.join("fish/completions")).unwrap();
    std::fs::copy(files.join("kolo.fish"), folder.0.join("fish/completions/kolo.fish")).unwrap();
    std::fs::write(folder.0.join("fish/config.fish"), "function fish_prompt; echo '# '; end\n").unwrap();
    std::fs::write(folder.0.join("my-program"), "").unwrap();
    std::os::unix::fs::symlink("/bin/true", folder.0.join("a-program")).unwrap();
    for shell in ["bash", "zsh", "fish"] {
        if output(Command::new(shell).args(["-c", "true"])).is_none() {
            continue;
        }
        // fish reads keys from a terminal of its own.
        let mut command = Command::new("setsid");
        command.args(["--ctty", "--wait", shell]);
        if shell == "bash" {
            command.arg("--noprofile").arg("--rcfile").arg(folder.0.join("bashrc"));
        }
        command.arg("-i").current_dir(&folder.0).env("PATH", path());
        // Where each looks for its files.
        command.env("HOME", &folder.0).env("ZDOTDIR", &folder.0).env("XDG_CONFIG_HOME", &folder.0);
        let mut terminal = crate::top::Pty::start_in(command, (30, 120));
        terminal.wait_for(|screen| screen.contains("# "));
        for (typed, completed) in [
            ("kolo benc\t", "kolo bench "),
            ("kolo run --keep-g\t", "kolo run --keep-going "),
            ("kolo compare --with deeps\t", "kolo compare --with deepspeed"),
            ("kolo run -n 4 -- ./a-pro\t", "kolo run -n 4 -- ./a-program "),
        ] {
            terminal.press(typed);
            terminal.wait_for(|screen| screen.contains(completed));
            // Clears the line.
            terminal.press("\u{1}\u{b}");
        }
        terminal.press("exit\r");
        assert!(terminal.program.wait().unwrap().success(), "{shell}: {}", terminal.all());
    }
}

// Elsewhere `man` has other options.
#[cfg(target_os = "linux")]
#[test]
fn man_pages_have_every_command_and_no_warnings() {
    let folder = Folder::new("man");
    said(&["man", folder.0.to_str().unwrap()]);
    let mut pages = folder.entries();
    pages.sort();
    let names: Vec<_> = pages.iter().map(|page| page.file_name().unwrap().to_str().unwrap()).collect();
    assert!(names.contains(&"kolo.1") && names.contains(&"kolo-run.1") && names.contains(&"kolo-compare.1"), "{names:?}");
    assert!(!names.iter().any(|name| name.contains("compete") || name.contains("help")), "{names:?}");
    for page in &pages {
        let mut man = Command::new("man");
        man.args(["--warnings", "-l"]).arg(page).env("MANWIDTH", "80").env("MANPAGER", "cat");
        let Some(shown) = output(&mut man) else { return };
        assert!(shown.contains("SYNOPSIS") && !shown.contains("warning:"), "{}: {shown}", page.display());
    }
}
