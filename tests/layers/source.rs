//! The sources of a crate without their tests, and what each of them refers to.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens;
use syn::{Attribute, Item, UseTree};

/// A path of modules from the root of the crate, such as `shm::flags`.
pub(crate) type ModulePath = Vec<String>;

/// One source file.
pub(crate) struct Source {
    /// Relative to the root of the crate, such as `shm/flags.rs`.
    pub file: String,
    pub module: ModulePath,
    pub text: String,
    /// What is compiled outside tests, without comments: token by token, without spaces.
    pub code: String,
    /// The paths within the crate that the code names, from the root of the crate.
    paths: Vec<Vec<String>>,
    /// What the module re-exports.
    exports: Vec<Use>,
}

/// The sources of one crate.
pub(crate) struct Sources {
    by_module: BTreeMap<ModulePath, Source>,
}

/// A `use` in the module where it stands: the whole path, and whether it is visible elsewhere.
struct Use {
    path: Vec<String>,
    name: String,
    is_exported: bool,
}

impl Sources {
    /// All files below `folder`, without tests.
    pub(crate) fn read(folder: &Path) -> Sources {
        let mut texts = Vec::new();
        let mut folders = vec![folder.to_owned()];
        while let Some(next) = folders.pop() {
            for entry in fs::read_dir(&next).unwrap_or_else(|error| panic!("{}: {error}", next.display())) {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let name = path.strip_prefix(folder).unwrap().to_str().unwrap().replace('\\', "/");
                    texts.push((name, fs::read_to_string(&path).unwrap()));
                }
            }
        }
        Sources::parse(texts.iter().map(|(name, text)| (name.as_str(), text.as_str())))
    }

    /// Sources by name and text. Modules that are compiled for tests only are left out.
    pub(crate) fn parse<'a>(texts: impl IntoIterator<Item = (&'a str, &'a str)>) -> Sources {
        let (mut files, mut tests) = (Vec::new(), Vec::new());
        for (file, text) in texts {
            let parsed = syn::parse_file(text).unwrap_or_else(|error| panic!("{file}: {error}"));
            let mut module: ModulePath = file.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
            if module.last().is_some_and(|name| ["mod", "lib", "main"].contains(&name.as_str())) {
                module.pop();
            }
            for item in &parsed.items {
                if let Item::Mod(inner) = item
                    && is_for_tests(item)
                {
                    tests.push([module.as_slice(), &[inner.ident.to_string()]].concat());
                }
            }
            let items = without_tests(parsed.items);
            files.push((file, text, module, items));
        }
        files.retain(|(_, _, module, _)| !tests.iter().any(|test| module.starts_with(test)));
        let lengths = |module: &ModulePath| (0..=module.len()).map(|length| module[..length].to_vec()).collect::<Vec<_>>();
        let modules: Modules = files.iter().flat_map(|(_, _, module, _)| lengths(module)).collect();
        let source = |(file, text, module, items): (&str, &str, ModulePath, Vec<Item>)| {
            let code = items.iter().map(|item| item.to_token_stream().to_string().replace(' ', "")).collect();
            let mut paths = Vec::new();
            add_paths(&items, &module, &modules, &mut paths);
            let exports = uses(&items, &module, &modules).into_iter().filter(|its| its.is_exported).collect();
            (module.clone(), Source { file: file.to_owned(), module, text: text.to_owned(), code, paths, exports })
        };
        Sources { by_module: files.into_iter().map(source).collect() }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Source> {
        self.by_module.values()
    }

    /// The modules that a source refers to, by `use` or by a path in its code, each with what it
    /// takes from there. A re-export counts as the module that it comes from.
    pub(crate) fn references(&self, source: &Source) -> BTreeMap<ModulePath, BTreeSet<String>> {
        let mut found: BTreeMap<ModulePath, BTreeSet<String>> = BTreeMap::new();
        for path in &source.paths {
            let (module, item) = self.resolve(path.clone());
            if module != source.module {
                found.entry(module).or_default().insert(item);
            }
        }
        found
    }

    /// The module where an item is defined, and its name there.
    fn resolve(&self, mut path: Vec<String>) -> (ModulePath, String) {
        // Eight re-exports of one name, each of the next, would be a circle.
        for _ in 0..8 {
            let length = self.length_of_module(&path);
            let (module, rest) = path.split_at(length);
            let Some(name) = rest.first() else { break };
            let exports = self.by_module.get(module).map_or(&[][..], |source| &source.exports);
            let Some(export) = exports.iter().find(|export| export.name == *name) else { break };
            path = [export.path.as_slice(), &rest[1..]].concat();
        }
        let length = self.length_of_module(&path);
        (path[..length].to_vec(), path[length..].join("::"))
    }

    fn length_of_module(&self, path: &[String]) -> usize {
        (0..=path.len()).rev().find(|&length| self.by_module.contains_key(&path[..length])).unwrap_or(0)
    }
}

impl Source {
    /// Whether it takes all names of a module above it.
    pub(crate) fn takes_all_from_above(&self) -> bool {
        self.code.contains("super::*")
    }
}

/// The modules of a crate, with folders that have no file of their own.
type Modules = BTreeSet<ModulePath>;

fn uses(items: &[Item], module: &[String], modules: &Modules) -> Vec<Use> {
    let mut found = Vec::new();
    for item in items {
        if let Item::Use(item) = item {
            let is_exported = !matches!(item.vis, syn::Visibility::Inherited);
            flatten(&item.tree, &mut Vec::new(), &mut |path, name| {
                if let Some(path) = absolute(module, path, modules) {
                    found.push(Use { path, name, is_exported });
                }
            });
        }
    }
    found
}

fn add_paths(items: &[Item], module: &[String], modules: &Modules, found: &mut Vec<Vec<String>>) {
    let (mut words, mut paths) = (BTreeSet::new(), Vec::new());
    for item in items {
        match item {
            Item::Use(_) => {}
            Item::Mod(inner) => {
                let items = inner.content.as_ref().map_or(&[][..], |(_, items)| items);
                add_paths(items, &[module, &[inner.ident.to_string()]].concat(), modules, found);
            }
            code => read_tokens(code.to_token_stream(), &mut words, &mut paths),
        }
    }
    found.extend(paths.into_iter().filter_map(|path| absolute(module, path, modules)));
    // A re-export is an entry in the table of contents, unless the source uses the name itself.
    let uses = uses(items, module, modules).into_iter().filter(|its| !its.is_exported || words.contains(&its.name));
    found.extend(uses.map(|its| its.path));
}

/// The paths in code that begin at the crate or at a module above, and all single words. Also looks
/// into macros.
fn read_tokens(code: TokenStream, words: &mut BTreeSet<String>, paths: &mut Vec<Vec<String>>) {
    let mut path: Vec<String> = Vec::new();
    let mut colons = 0;
    for token in code {
        match token {
            TokenTree::Ident(word) => {
                let word = word.to_string();
                words.insert(word.clone());
                if colons < 2 {
                    paths.push(std::mem::take(&mut path));
                }
                path.push(word);
                colons = 0;
            }
            TokenTree::Punct(mark) if mark.as_char() == ':' => colons += 1,
            other => {
                paths.push(std::mem::take(&mut path));
                colons = 0;
                if let TokenTree::Group(group) = other {
                    read_tokens(group.stream(), words, paths);
                }
            }
        }
    }
    paths.push(path);
    paths.retain(|path| path.len() > 1);
}

/// A path from the root of the crate; `None` if it leads out of it.
fn absolute(module: &[String], path: Vec<String>, modules: &Modules) -> Option<Vec<String>> {
    let (first, rest) = path.split_first()?;
    match first.as_str() {
        "crate" => Some(rest.to_vec()),
        "self" => Some([module, rest].concat()),
        "super" => {
            let above = path.iter().take_while(|part| *part == "super").count();
            let base = module.get(..module.len().checked_sub(above)?)?;
            Some([base, &path[above..]].concat())
        }
        _ => {
            let inside = [module, &path].concat();
            modules.contains(&inside[..module.len() + 1]).then_some(inside)
        }
    }
}

/// Calls `each` with every path of a tree of `use`, and the name that it has in the module.
fn flatten(tree: &UseTree, before: &mut Vec<String>, each: &mut impl FnMut(Vec<String>, String)) {
    let mut end = |name: String, shown: String| each(before.iter().cloned().chain([name]).collect(), shown);
    match tree {
        UseTree::Name(leaf) => end(leaf.ident.to_string(), leaf.ident.to_string()),
        UseTree::Rename(leaf) => end(leaf.ident.to_string(), leaf.rename.to_string()),
        UseTree::Glob(_) => end("*".to_owned(), "*".to_owned()),
        UseTree::Path(branch) => {
            before.push(branch.ident.to_string());
            flatten(&branch.tree, before, each);
            before.pop();
        }
        UseTree::Group(group) => group.items.iter().for_each(|tree| flatten(tree, before, each)),
    }
}

fn without_tests(items: Vec<Item>) -> Vec<Item> {
    let mut kept = Vec::new();
    for mut item in items {
        if is_for_tests(&item) {
            continue;
        }
        if let Item::Mod(module) = &mut item
            && let Some((_, inner)) = &mut module.content
        {
            *inner = without_tests(std::mem::take(inner));
        }
        kept.push(item);
    }
    kept
}

/// Whether an item is compiled for tests only.
fn is_for_tests(item: &Item) -> bool {
    let attributes: &[Attribute] = match item {
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    };
    attributes.iter().any(|attribute| {
        let text = attribute.to_token_stream().to_string().replace(' ', "");
        text == "#[cfg(test)]" || text.starts_with("#[cfg(all(test,")
    })
}
