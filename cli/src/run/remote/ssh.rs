//! How ssh is called, and what its failure means.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::Duration;

use crossbeam_channel::bounded;

/// The ssh program and its options.
pub(super) struct Ssh(Vec<String>);

/// How long `ssh -G` may take. It reads the configuration of ssh and connects to nothing.
const CONFIGURATION: Duration = Duration::from_secs(5);

impl Ssh {
    pub(super) fn parse(text: &str) -> Result<Ssh, String> {
        let words = shlex::split(text).ok_or_else(|| format!("--ssh {text}: a quotation mark has no end"))?;
        if words.is_empty() {
            return Err("--ssh is empty; give the ssh program and its options".to_owned());
        }
        Ok(Ssh(words))
    }

    pub(super) fn program(&self) -> &str {
        &self.0[0]
    }

    fn base(&self) -> Command {
        let mut command = Command::new(&self.0[0]);
        command.args(&self.0[1..]);
        command
    }

    /// Returns the command that runs `remote`, a line for the host's shell. ssh never asks for a
    /// password, and its attempt to connect and a broken connection end. The user's options come
    /// first, so they win.
    pub(super) fn command(&self, host: &str, remote: &str, connect: Duration) -> Command {
        let mut command = self.base();
        command.args(["-T", "-x", "-o", "BatchMode=yes", "-o"]);
        command.arg(format!("ConnectTimeout={}", connect.as_secs_f64().ceil().clamp(1.0, 1e6)));
        command.args(["-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3", host, remote]);
        command
    }

    /// Returns how the user can find out more.
    pub(super) fn check(&self, host: &str, remote: &str) -> String {
        let quoted = |word: &String| shlex::try_quote(word).map_or_else(|_| word.clone(), Into::into);
        let words: Vec<String> = self.0.iter().map(quoted).collect();
        format!("`{} {host} {remote}`", words.join(" "))
    }

    /// Returns the name or address that the configuration of ssh has for a host.
    pub(super) fn host_name(&self, host: &str) -> Option<String> {
        let mut command = self.base();
        command.args(["-G", host]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.env_remove("KOLO_SECRET").spawn().ok()?;
        let mut output = child.stdout.take()?.take(1 << 20);
        let (ended, end) = bounded(1);
        std::thread::spawn(move || {
            let mut text = String::new();
            _ = output.read_to_string(&mut text);
            _ = ended.send(text);
        });
        let text = end.recv_timeout(CONFIGURATION);
        _ = child.kill();
        _ = child.wait();
        text.ok()?.lines().find_map(|line| line.strip_prefix("hostname ")).map(|name| name.trim().to_owned())
    }
}

/// Returns a path as a word of the host's shell, which replaces `~/` at its beginning.
pub(super) fn remote_word(path: &str) -> Result<String, String> {
    let (home, rest) = path.strip_prefix("~/").map_or(("", path), |rest| ("~/", rest));
    let quoted = shlex::try_quote(rest).map_err(|_| format!("{path:?} cannot be given to the shell of a host"))?;
    Ok(format!("{home}{quoted}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_the_user_come_first_and_the_host_before_the_remote_command() {
        let ssh = Ssh::parse("ssh -p 2222 -F 'a file'").unwrap();
        let command = ssh.command("b", "kolo agent", Duration::from_millis(1500));
        let arguments: Vec<_> = command.get_args().map(|word| word.to_str().unwrap()).collect();
        assert_eq!(arguments[..5], ["-p", "2222", "-F", "a file", "-T"]);
        assert!(arguments.contains(&"BatchMode=yes") && arguments.contains(&"ConnectTimeout=2"), "{arguments:?}");
        assert_eq!(arguments[arguments.len() - 2..], ["b", "kolo agent"]);
        assert_eq!(ssh.check("b", "true"), "`ssh -p 2222 -F 'a file' b true`");
        assert!(Ssh::parse("ssh 'x").is_err() && Ssh::parse(" ").is_err());
    }

    #[test]
    fn paths_are_words_of_a_shell() {
        for (path, word) in [("/a/kolo", "/a/kolo"), ("~/my kolo", "~/'my kolo'"), ("a;b", "'a;b'"), ("kolo", "kolo")] {
            assert_eq!(remote_word(path).as_deref(), Ok(word));
        }
        assert!(remote_word("a\0b").is_err());
    }
}
