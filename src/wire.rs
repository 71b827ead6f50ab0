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

    /// Appends a number that is usually small: seven bits in a byte, the lowest first, as in LEB128.
    pub(crate) fn small(&mut self, number: u64) -> &mut Self {
        let mut left = number;
        while left >= 0x80 {
            self.0.push(left as u8 | 0x80);
            left >>= 7;
        }
        self.0.push(left as u8);
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

    /// Appends the number of records, then each as its differences from the one before: its length, and
    /// in turns how many bytes are the same at the same places, how many are not, and the latter. Records
    /// with the same fields, most of which have the same values, become small.
    pub(crate) fn alike(&mut self, records: impl ExactSizeIterator<Item = Vec<u8>>) -> &mut Self {
        self.small(records.len() as u64);
        let mut before = Vec::new();
        for record in records {
            self.small(record.len() as u64);
            let is_same = |at: usize| before.get(at) == record.get(at);
            let mut at = 0;
            while at < record.len() {
                let same = (at..record.len()).take_while(|&at| is_same(at)).count();
                let from = at + same;
                // Fewer bytes that are the same take no less than themselves.
                let ends = |&end: &usize| (end..end + SHORTEST_RUN).all(|at| at < record.len() && is_same(at));
                at = (from..record.len()).find(ends).unwrap_or(record.len());
                self.small(same as u64).small((at - from) as u64);
                self.0.extend(&record[from..at]);
            }
            before = record;
        }
        self
    }
}

/// The fewest bytes of [`Writer::alike`] that are said to be the same: two numbers say it.
const SHORTEST_RUN: usize = 3;

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

    /// Takes what [`Writer::small`] wrote.
    pub(crate) fn small(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..u64::BITS).step_by(7) {
            let [byte] = self.array()?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                return None;
            }
            number |= bits << shift;
            if byte < 0x80 {
                return Some(number);
            }
        }
        None
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

    /// Takes what [`Writer::alike`] wrote, each record by `read`. No record is longer than the bytes that
    /// are read.
    pub(crate) fn alike<T>(&mut self, mut read: impl FnMut(&[u8]) -> Option<T>) -> Option<Vec<T>> {
        let count = self.small()?;
        let (mut records, mut record, mut before) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..count {
            let len = usize::try_from(self.small()?).ok()?;
            while record.len() < len {
                let (same, others) = (usize::try_from(self.small()?).ok()?, usize::try_from(self.small()?).ok()?);
                record.extend_from_slice(before.get(record.len()..record.len().checked_add(same)?)?);
                record.extend_from_slice(self.take(others)?);
                if same == 0 && others == 0 {
                    return None;
                }
            }
            records.push(read(&record).filter(|_| record.len() == len)?);
            std::mem::swap(&mut record, &mut before);
            record.clear();
        }
        Some(records)
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

    #[test]
    fn records_that_differ_in_few_bytes_are_small() {
        let record = |rank: u8| [vec![7; 100], vec![rank, 1, 2, rank], vec![9; 100]].concat();
        let mut writer = Writer::default();
        writer.alike((0..100).map(record));
        // Of the others, two for the length, four that differ, and how many are the same and differ.
        let (first, other) = (204 + 5, 2 + 4 + 4);
        assert!(writer.0.len() <= 1 + first + 99 * other, "{} bytes", writer.0.len());
    }

    #[test]
    fn a_number_of_more_than_64_bits_is_none() {
        for (bytes, number) in [
            (vec![0xff; 10], None),
            ([vec![0xff; 9], vec![1]].concat(), Some(u64::MAX)),
            ([vec![0xff; 9], vec![2]].concat(), None),
        ] {
            assert_eq!(Reader::new(&bytes).small(), number, "{bytes:?}");
        }
    }

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
        fn small_numbers_are_read_back(number: u64, bits in 0u32..64) {
            let number = number >> bits;
            let mut writer = Writer::default();
            writer.small(number);
            prop_assert_eq!(writer.0.len(), (64 - number.leading_zeros()).div_ceil(7).max(1) as usize);
            prop_assert_eq!(Reader::new(&writer.0).small(), Some(number));
            prop_assert_eq!(Reader::new(&writer.0[1..]).small().is_none(), number < 0x80);
        }

        #[test]
        fn records_are_read_back(records in proptest::collection::vec(proptest::collection::vec(0u8..3, 0..20), 0..9)) {
            let mut writer = Writer::default();
            writer.alike(records.iter().cloned());
            let mut reader = Reader::new(&writer.0);
            prop_assert_eq!(reader.alike(|record| Some(record.to_vec())), Some(records));
            prop_assert!(reader.is_at_end());
        }

        #[test]
        fn any_bytes_can_be_read(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let mut reader = Reader::new(&bytes);
            let _ = reader.list(|reader| Some((reader.text()?, reader.number()?)));
            prop_assert!(reader.at() <= bytes.len());
            let mut reader = Reader::new(&bytes);
            let records = reader.alike(|record| Some(record.len())).unwrap_or_default();
            prop_assert!(reader.at() <= bytes.len() && records.iter().all(|&len| len <= bytes.len()));
        }
    }
}
