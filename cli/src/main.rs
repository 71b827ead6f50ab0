//! The `kolo` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    kolo_cli::main()
}
