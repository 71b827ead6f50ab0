//! Small records as bytes, little-endian, which ranks exchange through stores. Reading treats its
//! input as untrusted.

/// Appends fields to bytes.
#[derive(Default)]
pub(crate) struct Writer(pub(crate) Vec<u8>);

impl Writer {
    pub(crate) fn number(&mut self, number: u64) -> &mut Self {
        self.0.extend(number.to_le_bytes());
        self
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.number(bytes.len() as u64);
        self.0.extend(bytes);
        self
    }

    pub(crate) fn text(&mut self, text: &str) -> &mut Self {
        self.bytes(text.as_bytes())
    }

    /// Appends the number of fields, then the fields.
    pub(crate) fn list<T>(&mut self, fields: &[T], mut field: impl FnMut(&mut Self, &T)) -> &mut Self {
        self.number(fields.len() as u64);
        fields.iter().for_each(|value| field(self, value));
        self
    }
}

/// Takes fields from the front of bytes; `None` if the bytes are not such a field.
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { bytes, at: 0 }
    }

    /// Returns how many bytes have been taken.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    /// Returns whether all bytes have been taken.
    pub(crate) fn is_at_end(&self) -> bool {
        self.at == self.bytes.len()
    }

    pub(crate) fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let taken = self.bytes.get(self.at..self.at.checked_add(len)?)?;
        self.at += len;
        Some(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    pub(crate) fn number(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn size(&mut self) -> Option<usize> {
        usize::try_from(self.number()?).ok()
    }

    pub(crate) fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = self.size()?;
        self.take(len)
    }

    pub(crate) fn text(&mut self) -> Option<String> {
        String::from_utf8(self.bytes()?.to_vec()).ok()
    }

    /// Takes a count and as many fields. Memory grows with the fields that are there, not with the
    /// count.
    pub(crate) fn list<T>(&mut self, mut field: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let count = self.size()?;
        let mut fields = Vec::new();
        for _ in 0..count {
            fields.push(field(self)?);
        }
        Some(fields)
    }
}

/// Returns bytes as hexadecimal digits.
pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Reader, Writer};

    proptest! {
        #[test]
        fn written_fields_are_read_back(number: u64, text in ".*", list in proptest::collection::vec(any::<u64>(), 0..9)) {
            let mut writer = Writer::default();
            writer.number(number).text(&text).list(&list, |writer, &field| _ = writer.number(field));
            let mut reader = Reader::new(&writer.0);
            prop_assert_eq!(reader.number(), Some(number));
            prop_assert_eq!(reader.text(), Some(text));
            prop_assert_eq!(reader.list(Reader::number), Some(list));
            prop_assert_eq!(reader.number(), None);
        }

        #[test]
        fn any_bytes_can_be_read(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let mut reader = Reader::new(&bytes);
            let _ = reader.list(|reader| Some((reader.text()?, reader.number()?)));
            prop_assert!(reader.at() <= bytes.len());
        }
    }
}
