//! What the header says, for Python: the constants, structs and functions as ctypes has them, and the
//! keywords of settings.

use std::collections::HashMap;

const HEAD: &str = r#""""kolo's C ABI: what kolo.h says, for ctypes.

Generated: do not change it. After a change of the header: KOLO_WRITE_HEADER=1 cargo test --test header
"""

from __future__ import annotations

import os
from ctypes import CFUNCTYPE, POINTER, Structure, c_char, c_char_p, c_double, c_int32, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from datetime import timedelta
from typing import Any, TypedDict
"#;

/// Types of ctypes by their names in C.
struct Types(HashMap<String, String>);

impl Types {
    fn new() -> Types {
        let simple =
            ["int32_t", "uint8_t", "uint32_t", "uint64_t", "double", "char"].map(|name| (name, name.trim_end_matches("_t")));
        let simple = simple.into_iter().chain([("size_t", "size_t")]);
        Types(simple.map(|(name, of)| (name.to_owned(), format!("c_{of}"))).collect())
    }

    /// Returns the type of a declaration without its name.
    fn of(&self, declared: &str) -> String {
        let stars = declared.matches('*').count();
        let is_base = |word: &&str| !["", "const", "struct"].contains(word);
        let base = declared.split(|letter: char| letter.is_whitespace() || letter == '*').find(is_base);
        match (base.unwrap(), stars) {
            ("void", 0) => "None".to_owned(),
            ("void", 1) => "c_void_p".to_owned(),
            ("void", _) => "POINTER(c_void_p)".to_owned(),
            ("char", 1) => "c_char_p".to_owned(),
            ("char", 2) => "POINTER(c_char_p)".to_owned(),
            (base, 0) => self.0[base].clone(),
            (base, _) => format!("POINTER({})", self.0[base]),
        }
    }

    /// Returns the types of a result and of parameters, which may end with a parenthesis.
    fn result_and_parameters(&self, result: &str, parameters: &str) -> Vec<String> {
        let parameters = parameters.trim_end_matches(')').split(',').filter(|each| each.trim() != "void");
        std::iter::once(self.of(result)).chain(parameters.map(|each| self.of(split_name(each).0))).collect()
    }

    fn function(&self, result: &str, parameters: &str) -> String {
        format!("CFUNCTYPE({})", self.result_and_parameters(result, parameters).join(", "))
    }
}

/// Splits a declaration into its type and its name.
fn split_name(declared: &str) -> (&str, &str) {
    let declared = declared.trim();
    declared.split_at(declared.rfind(|letter: char| !letter.is_alphanumeric() && letter != '_').map_or(0, |at| at + 1))
}

/// Returns the name in Python of a type: `CommStats` of `kolo_comm_stats_t`.
fn class_name(name: &str) -> String {
    let words = name.trim_start_matches("kolo_").trim_end_matches("_t").split('_');
    words.map(|word| word[..1].to_uppercase() + &word[1..]).collect()
}

/// Returns the constants: causes and operations as lists of their names, the others as they are.
fn constants(header: &str) -> String {
    let defined = header.lines().filter_map(|line| line.strip_prefix("#define KOLO_")?.split_once(' '));
    let numbers: Vec<(&str, i64)> = defined.filter_map(|(name, number)| Some((name, number.parse().ok()?))).collect();
    let of = |name: &str| numbers.iter().find(|(other, _)| *other == name).expect("the header has its version").1;
    let [major, minor, patch] = ["MAJOR", "MINOR", "PATCH"].map(|part| of(&format!("VERSION_{part}")));
    let mut text = format!("\nVERSION = ({major}, {minor}, {patch})\n\n");
    let is_listed = |name: &str| ["CAUSE_", "OP_", "VERSION_"].iter().any(|prefix| name.starts_with(prefix));
    for (name, number) in numbers.iter().filter(|(name, _)| !is_listed(name)) {
        text += &format!("{name} = {number}\n");
    }
    for (list, prefix) in [("CAUSES", "CAUSE_"), ("OPS", "OP_")] {
        let mut names: Vec<_> = numbers.iter().filter_map(|(name, number)| Some((number, name.strip_prefix(prefix)?))).collect();
        names.retain(|(number, _)| **number >= 0);
        names.sort_unstable();
        assert!((0..).zip(&names).all(|(at, (number, _))| at == **number), "{list} has a gap");
        text += &format!("\n# The names of KOLO_{prefix}, by number.\n{list} = (\n");
        for (_, name) in names {
            text += &if name == "NONE" { "    None,\n".to_owned() } else { format!("    \"{}\",\n", name.to_lowercase()) };
        }
        text += ")\n";
    }
    text
}

/// Splits a text into declarations, each with its comment. A struct is one declaration.
fn declarations(text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let (mut comment, mut declared, mut is_macro) = (String::new(), String::new(), false);
    for line in text.lines() {
        if std::mem::replace(&mut is_macro, line.ends_with('\\')) || line.starts_with(['#', '}']) && !line.ends_with(';') {
            continue;
        }
        if let Some(words) = line.trim().strip_prefix("//").filter(|_| declared.is_empty()) {
            comment += words;
        } else if line.trim().is_empty() || line.starts_with("extern") {
            comment.clear();
        } else {
            declared += &format!("{line}\n");
            let is_struct = declared.starts_with("typedef struct ") && declared.contains('{');
            if line.ends_with(';') && (!is_struct || line.starts_with('}')) {
                let declared = std::mem::take(&mut declared);
                found.push((std::mem::take(&mut comment).trim().to_owned(), declared.trim().trim_end_matches(';').to_owned()));
            }
        }
    }
    found
}

/// Returns the fields of a struct: the comment, the type, and the name.
fn fields(body: &str) -> Vec<(String, String, String)> {
    let split = |(comment, declared): (String, String)| {
        let (kind, name) = split_name(&declared);
        (comment, kind.to_owned(), name.to_owned())
    };
    declarations(body).into_iter().map(split).collect()
}

/// Returns a struct, and the types of the functions that its fields point to.
fn structure(name: &str, body: &str, types: &Types) -> String {
    let class = class_name(name);
    let (mut functions, mut lines) = (String::new(), String::new());
    for (_, kind, field) in fields(body) {
        let (field, of) = if let Some((result, rest)) = kind.split_once("(*") {
            let (field, parameters) = rest.split_once(")(").unwrap();
            let of = class.clone() + &class_name(field);
            functions += &format!("\n{of} = {}\n", types.function(result, parameters));
            (field.to_owned(), of)
        } else if let Some((rest, length)) = kind.split_once('[') {
            let (kind, field) = split_name(rest);
            (field.to_owned(), format!("{} * {}", types.of(kind), length.trim_end_matches(']')))
        } else {
            (field, types.of(&kind))
        };
        lines += &format!("        (\"{field}\", {of}),\n");
    }
    format!("{functions}\n\nclass {class}(Structure):\n    _fields_ = (\n{lines}    )\n")
}

/// Returns a documentation string in a class, where names are between double backticks.
fn documentation(text: &str) -> String {
    let mut lines = vec![String::from("    \"\"\"")];
    for word in text.replace('`', "``").split(' ') {
        let line = lines.last_mut().unwrap();
        if line.len() + word.len() > 98 {
            lines.push(format!("    {word}"));
        } else {
            *line += if line.ends_with("\"\"\"") { "" } else { " " };
            *line += word;
        }
    }
    let end = if lines.len() > 1 { "\n    " } else { "" };
    format!("{}{end}\"\"\"\n", lines.join("\n"))
}

/// Returns the settings, with the types and the words of Python.
fn settings(body: &str) -> String {
    let mut text = "\n\nclass Settings(TypedDict, total=False):\n".to_owned();
    text += &documentation("Settings by name. One that is not given comes from its `KOLO_*` variable. Times are in seconds.");
    for (comment, kind, name) in fields(body).into_iter().filter(|(.., name)| !["size", "version"].contains(&name.as_str())) {
        let kind = match kind.trim() {
            _ if name.ends_with("timeout_ms") => "float | timedelta",
            "int32_t" => "bool",
            "uint32_t" => "int",
            "double" => "float",
            "const char *" => "str | os.PathLike[str]",
            other => panic!("{name}: no setting is a {other}"),
        };
        text += &format!("\n    {}: {kind}\n", name.trim_end_matches("_ms"));
        let words = [("-1: ", "False: "), ("1: ", "True: "), ("0: ", "None: "), ("milliseconds", "seconds"), ("\"", "`")];
        let names = [("kolo_comm_init_env", "`from_env`"), ("kolo_comm_grow", "`grow`")];
        let comment = words.iter().chain(&names).fold(comment, |text, (in_c, in_python)| text.replace(in_c, in_python));
        if !comment.is_empty() {
            text += &documentation(&comment);
        }
    }
    text
}

/// Returns the module for a header.
pub(crate) fn generate(header: &str) -> String {
    let mut types = Types::new();
    let (mut structures, mut keywords, mut functions) = (String::new(), String::new(), String::new());
    for (_, declared) in declarations(header.split_once("#include <stdint.h>").unwrap().1) {
        if let Some((name, rest)) = declared.strip_prefix("typedef struct ").and_then(|rest| rest.split_once(" {\n")) {
            let body = rest.rsplit_once("\n}").unwrap().0;
            types.0.insert(name.to_owned(), class_name(name));
            structures += &structure(name, body, &types);
            if name == "kolo_config_t" {
                keywords = settings(body);
            }
        } else if let Some(declared) = declared.strip_prefix("typedef ") {
            if let Some((result, rest)) = declared.split_once("(*") {
                let (name, parameters) = rest.split_once(")(").unwrap();
                structures += &format!("\n{} = {}\n", class_name(name), types.function(result, parameters));
                types.0.insert(name.to_owned(), class_name(name));
            } else {
                let (kind, name) = split_name(declared);
                // A handle, whose struct nothing describes, is an address.
                let of = if kind.starts_with("struct ") { "c_void_p".to_owned() } else { types.of(kind) };
                types.0.insert(name.to_owned(), of);
            }
        } else {
            let (result_and_name, parameters) = declared.split_once('(').expect("it is a function");
            let (result, name) = split_name(result_and_name);
            let all = types.result_and_parameters(result, parameters);
            let comma = if all.len() == 1 { "," } else { "" };
            functions += &format!("    \"{}\": ({}{comma}),\n", name.trim_start_matches("kolo_"), all.join(", "));
        }
    }
    let constants = constants(header);
    format!(
        "{HEAD}{constants}{structures}{keywords}\n\n# The result and the arguments of each function.\n\
         FUNCTIONS: dict[str, tuple[Any, ...]] = {{\n{functions}}}\n"
    )
}
