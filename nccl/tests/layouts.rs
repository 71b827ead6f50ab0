//! Prints the structs of this library as assertions in C, which a stage compiles with NVIDIA's header:
//! `cargo test -p kolo-nccl --test layouts -- --nocapture --exact layouts_for_c`.

#![allow(non_camel_case_types, non_snake_case, dead_code, missing_docs)]

#[path = "../src/structs.rs"]
mod structs;

#[test]
fn layouts_for_c() {
    let mut fields = 0;
    for (name, size, offsets) in structs::LAYOUTS {
        println!("_Static_assert(sizeof({name}) == {size}, \"{name}\");");
        for (field, offset) in *offsets {
            println!("_Static_assert(offsetof({name}, {field}) == {offset}, \"{name}.{field}\");");
            fields += 1;
        }
    }
    assert!(fields > 70, "only {fields} fields");
}
