//! `include/kolo.h` is what the sources say, and `python/src/pykolo/_abi.py` what the header says. After
//! a change of the sources: `KOLO_WRITE_HEADER=1 cargo test --test header`.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

#[path = "header/python.rs"]
mod python;

use cbindgen::{Builder, Config, DocumentationStyle, Language, Style};

/// In the order of the header.
const SOURCES: [&str; 18] = [
    "version",
    "codes",
    "error",
    "last_error",
    "arguments",
    "config",
    "unique_id",
    "store",
    "communicator",
    "statistics",
    "collectives",
    "work",
    "nonblocking",
    "wait_check",
    "group",
    "memory",
    "reducer_config",
    "reducer",
];

/// The initial value of a struct without a version.
const ERROR_INITIALIZER: &str = "
// The initial value of a kolo_error_t, before kolo_last_error.
#define KOLO_ERROR_INITIALIZER \\
  { sizeof(kolo_error_t), 0, 0, 0, 0, 0, 0, 0, 0, { 0 }, { 0 } }
";

/// Macros with the names of functions. They follow the declarations, which they would replace.
/// Within its own macro, a name is that of the function.
const CHECKS: &str = "
// Each function that makes a communicator is also a macro, which checks the version first: it is
// KOLO_ERR_VERSION if this header and the loaded library have different ABIs.
#define KOLO_CHECKED(call) (kolo_check_version(KOLO_VERSION) == KOLO_OK ? (call) : KOLO_ERR_VERSION)
#define kolo_comm_init_env(...) KOLO_CHECKED(kolo_comm_init_env(__VA_ARGS__))
#define kolo_comm_init_rank(...) KOLO_CHECKED(kolo_comm_init_rank(__VA_ARGS__))
#define kolo_comm_init_store(...) KOLO_CHECKED(kolo_comm_init_store(__VA_ARGS__))
#define kolo_comm_init_callbacks(...) KOLO_CHECKED(kolo_comm_init_callbacks(__VA_ARGS__))
#define kolo_comm_init_all(...) KOLO_CHECKED(kolo_comm_init_all(__VA_ARGS__))
";

/// The structs with a version: each with its source, and what its comment adds.
const VERSIONED: [(&str, &str, &str); 2] = [
    ("config", "KOLO_CONFIG", ": `kolo_config_t config = KOLO_CONFIG_INITIALIZER;`"),
    ("reducer_config", "KOLO_REDUCER_CONFIG", "."),
];

fn read(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("src/{name}.rs"))).unwrap()
}

/// Returns the initial values of structs, for which cbindgen generates no macros.
fn initializers() -> String {
    let mut text = String::new();
    for (source, prefix, comment) in VERSIONED {
        let kind = format!("{}_t", prefix.to_lowercase());
        let source = read(source);
        let fields = source.split(&format!("pub struct {kind} {{")).nth(1).unwrap().split("\n}").next().unwrap();
        let fields = fields.lines().filter_map(|line| line.trim().strip_prefix("pub ")?.trim_end_matches(',').split_once(": "));
        let values: Vec<String> = fields
            .map(|(name, of)| match (name, of) {
                ("size", _) => format!("sizeof({kind})"),
                ("version", _) => format!("{prefix}_VERSION"),
                (_, "f64") => "0.0".to_owned(),
                (_, pointer) if pointer.starts_with('*') || ["kolo_hook_function_t", "kolo_stream_t"].contains(&pointer) => {
                    "NULL".to_owned()
                }
                _ => "0".to_owned(),
            })
            .collect();
        let values = values.join(", ");
        text += &format!("\n// The initial value of a {kind}{comment}\n#define {prefix}_INITIALIZER \\\n  {{ {values} }}\n");
    }
    text + ERROR_INITIALIZER
}

/// Returns a source as cbindgen can read it, which expands no macros: without the one around
/// kolo_config_t, with the functions that `operations!` defines, and with the numbers of operations.
fn expanded(name: &str) -> String {
    let text = read(name).replace("\nconfig! {\n", "\n").replace("\n}\n}\n", "\n}\n");
    let [run, start] = operations();
    let numbers = kolo::Op::ALL.iter().map(|op| {
        let name = if *op == kolo::Op::Alloc { "MEM_ALLOC".to_owned() } else { op.name().to_uppercase() };
        format!("pub const KOLO_OP_{name}: kolo_op_t = {};\n", *op as u8)
    });
    match name {
        "collectives" => text.replacen("\noperations! {\n", &format!("\n{run}\noperations! {{\n"), 1),
        "nonblocking" => text.replacen("\n\n", &format!("\n\n{start}\n"), 1),
        "codes" => {
            text.replacen("\n// KOLO_OP_ALL_REDUCE", &format!("\n{}\n// KOLO_OP_ALL_REDUCE", numbers.collect::<String>()), 1)
        }
        _ => text,
    }
}

/// Returns the blocking functions that the rows of `operations!` define, and the nonblocking ones.
fn operations() -> [String; 2] {
    let source = read("collectives");
    let rows = source.split("\noperations! {\n").nth(1).unwrap().split("\n}\n").next().unwrap();
    let [mut run, mut start] = [String::new(), String::new()];
    let define = |to: &mut String, doc: &str, name: &str, arguments: &str| {
        *to += &format!("{doc}#[unsafe(no_mangle)]\npub unsafe extern \"C\" fn {name}({arguments}) -> kolo_result_t {{ 0 }}\n\n");
    };
    let (mut doc, mut arguments) = (String::new(), String::new());
    for line in rows.lines().map(str::trim) {
        if line.starts_with("///") {
            doc += &format!("{line}\n");
        } else if let Some((name, list)) = line.split_once('(').filter(|_| line.starts_with("kolo_")) {
            let list = list.strip_suffix(')').expect("the arguments of a row are one line");
            let list = if list.is_empty() { String::new() } else { format!("{list}, ") };
            arguments = list + "comm: kolo_comm_t, stream: kolo_stream_t";
            define(&mut run, &std::mem::take(&mut doc), name, &arguments);
        } else if let Some(name) = line.strip_suffix(';').filter(|_| line.starts_with("kolo_start_")) {
            define(&mut start, &std::mem::take(&mut doc), name, &format!("{arguments}, work: *mut kolo_work_t"));
        }
    }
    [run, start]
}

/// Returns the path of a source for cbindgen.
fn source(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.rs"));
    fs::write(&path, expanded(name)).unwrap();
    path
}

fn generate() -> String {
    // Tests of one program run at the same time, and write the same files.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = Config {
        language: Language::C,
        cpp_compat: true,
        include_guard: Some("KOLO_H".to_owned()),
        no_includes: true,
        sys_includes: vec!["stddef.h".to_owned(), "stdint.h".to_owned()],
        usize_is_size_t: true,
        style: Style::Both,
        documentation_style: DocumentationStyle::C99,
        line_length: 120,
        header: Some(fs::read_to_string(root.join("src/header.txt")).unwrap().trim_end().to_owned()),
        after_includes: Some(initializers().trim_end().to_owned()),
        ..Config::default()
    };
    let sources = SOURCES.iter().map(|name| source(name));
    let builder = sources.fold(Builder::new().with_config(config), Builder::with_src);
    let mut header = Vec::new();
    builder.generate().expect("cbindgen reads the sources").write(&mut header);
    let header = String::from_utf8(header).unwrap();
    let (declarations, end) = header.split_at(header.rfind("\n#endif").expect("the header ends with its guard"));
    format!("{declarations}{CHECKS}{end}")
}

/// Compares a file of the repository with what it has to be, or writes it.
fn check(file: &str, generated: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    if std::env::var_os("KOLO_WRITE_HEADER").is_some() {
        fs::write(&path, generated).unwrap();
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    let different = generated.lines().zip(committed.lines()).find(|(generated, committed)| generated != committed);
    assert!(
        generated == committed,
        "{file} is not what capi/src says, first at {different:?}; run KOLO_WRITE_HEADER=1 cargo test --test header"
    );
}

#[test]
fn the_header_is_what_the_sources_say() {
    check("include/kolo.h", &generate());
}

#[test]
fn the_python_module_has_what_the_header_says() {
    // The crate alone has no module.
    if Path::new(env!("CARGO_MANIFEST_DIR")).join("../python").exists() {
        check("../python/src/pykolo/_abi.py", &python::generate(&generate()));
    }
}

#[test]
fn every_source_is_in_the_header() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut exported = 0;
    let header = generate();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let source = expanded(path.file_stem().unwrap().to_str().unwrap());
        for after in source.split("#[unsafe(no_mangle)]\n").skip(1) {
            let name = after.split("fn ").nth(1).unwrap().split('(').next().unwrap();
            // The macro of collectives has a name for each row.
            if name.starts_with('$') {
                continue;
            }
            assert!(name.starts_with("kolo_"), "{name} in {}", path.display());
            assert!(header.contains(&format!("{name}(")), "{name} of {} is not in the header", path.display());
            let is_checked = header.contains(&format!("#define {name}(...) KOLO_CHECKED({name}(__VA_ARGS__))"));
            assert_eq!(is_checked, name.starts_with("kolo_comm_init_"), "{name}: the macro that checks the version");
            exported += 1;
        }
    }
    assert!(exported > 40, "only {exported} functions were found");
}
