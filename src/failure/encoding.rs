//! Descriptors of operations in the messages between ranks.

use crate::types::Descriptor;
use crate::wire::{Reader, Writer};

pub(super) fn write_call(writer: &mut Writer, call: &Descriptor) {
    write_words(writer, call.encode());
}

pub(super) fn read_call(reader: &mut Reader<'_>) -> Option<Descriptor> {
    Descriptor::decode(read_words(reader)?)
}

pub(super) fn write_words(writer: &mut Writer, words: [u64; Descriptor::WORDS]) {
    words.iter().for_each(|&word| _ = writer.number(word));
}

pub(super) fn read_words(reader: &mut Reader<'_>) -> Option<[u64; Descriptor::WORDS]> {
    Some([reader.number()?, reader.number()?, reader.number()?, reader.number()?])
}
