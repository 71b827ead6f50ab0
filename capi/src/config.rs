//! The settings of a communicator: a struct that may grow.

use std::ffi::c_char;

use kolo::plan::CostModel;
use kolo::{Builder, Communicator, settings};

use crate::fault::Fault;
use crate::pointers::text;
use crate::sized::{self, Grows};

/// The version of kolo_config_t in this header.
pub const KOLO_CONFIG_VERSION: u32 = 1;

/// Defines the struct as it is written, and lists what its fields say.
macro_rules! config {
    ($(#[$meta:meta])* pub struct $name:ident { $($(#[$doc:meta])* pub $field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        pub struct $name {
            $($(#[$doc])* pub $field: $type,)*
        }

        impl $name {
            /// Returns the names and values of the fields that are set.
            ///
            /// # Safety
            ///
            /// Texts are null or end with a zero.
            unsafe fn given(&self) -> Result<Vec<(&'static str, String)>, Fault> {
                let mut given = Vec::new();
                $(
                    // SAFETY: passed on.
                    if let Some(value) = unsafe { self.$field.given(concat!("config->", stringify!($field)))? } {
                        given.push((stringify!($field), value));
                    }
                )*
                Ok(given)
            }
        }
    };
}

// The test of the header takes this line away, and the brace at the end: cbindgen expands no macros.
config! {
/// Settings of a communicator. Initialize it with KOLO_CONFIG_INITIALIZER, or with zeros, `size`
/// and `version`. A field that is zero or NULL is not set: its value comes from the environment
/// variable of the same name (`KOLO_TIMEOUT`; for `interfaces`, `KOLO_INTERFACE`), then from the
/// launcher, then from a default. kolo copies what it needs: the caller may free everything when
/// the call has returned.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kolo_config_t {
    /// `sizeof(kolo_config_t)`.
    pub size: usize,
    /// KOLO_CONFIG_VERSION.
    pub version: u32,
    /// 1: reductions have the same bits whatever the transport, layout and size. -1: they need not.
    /// All ranks use rank 0's value.
    pub reproducible: i32,
    /// The timeout of one operation, in milliseconds. Default: 5 minutes.
    pub timeout_ms: u64,
    /// How long ranks wait for each other when they connect, in milliseconds. Default: 30 seconds.
    pub start_timeout_ms: u64,
    /// "auto", "tcp" or "shm". All ranks use rank 0's value.
    pub transport: *const c_char,
    /// How large private buffers and messages are copied between processes: "auto", "staged",
    /// "streamed" or "cma" (messages as with "auto"). All ranks use rank 0's value.
    pub copy_mode: *const c_char,
    /// The algorithm for all operations that have it, such as "ring". All ranks use rank 0's value.
    pub algorithm: *const c_char,
    /// The name of the job. It distinguishes jobs that use the same store.
    pub job: *const c_char,
    /// The secret of the job: 64 hexadecimal digits, the same on all ranks.
    pub secret: *const c_char,
    /// The name of this rank's host. Ranks with different names do not share memory.
    pub host: *const c_char,
    /// The network interfaces or addresses that may be used, as in "eth", "=eth0", "^lo,docker",
    /// "10.0.0.0/8".
    pub interfaces: *const c_char,
    /// The number of TCP connections of one link, 1 to 64. All ranks use rank 0's value.
    pub sockets: u32,
    /// 1: kolo handles SIGUSR1, which makes a rank write its last operations to `trace_dir`. -1: it
    /// does not.
    pub trace_signal: i32,
    /// Latency between hosts in microseconds, for choosing algorithms. Set both this and
    /// `network_gigabytes_per_s`. All ranks use rank 0's values.
    pub network_latency_us: f64,
    /// Rate of one host's network interface in gigabytes per second, for choosing algorithms.
    pub network_gigabytes_per_s: f64,
    /// A folder to which a rank writes its last operations when one of them fails, for `kolo
    /// trace`.
    pub trace_dir: *const c_char,
    /// 1: a tcp:// store accepts other machines even without a secret: any process that reaches it
    /// can join or disturb the job. -1: it does not.
    pub insecure: i32,
    /// 1: buffers may be in the memory of GPUs. -1: they may not. 0: they may if the machine has a
    /// driver. All ranks use rank 0's value. Every rank's kolo needs the feature `cuda`.
    pub devices: i32,
    /// How data moves between the memory of GPUs: "auto" or "staged". All ranks use rank 0's value.
    pub device_path: *const c_char,
    /// A file with the secret as 64 hexadecimal digits. The file belongs to the user of the
    /// process, and no other user may open it. `secret` takes precedence.
    pub secret_file: *const c_char,
    /// PEM files for encrypted links between hosts, all three or none: the certificate of the job's
    /// authority, this rank's certificate, which the authority has signed for the name `kolo`, and
    /// its private key.
    pub tls_ca: *const c_char,
    pub tls_cert: *const c_char,
    pub tls_key: *const c_char,
    /// How ranks of a host learn that all have reached a phase: "auto", "flat" or "hierarchy". All
    /// ranks use rank 0's value.
    pub flag_layout: *const c_char,
    /// Where ranks that each have a GPU of their own wait for each other, in a large operation on buffers
    /// that are open to all of them: "kernels" or "host". All ranks use rank 0's value.
    pub device_waits: *const c_char,
    /// How elements of messages between hosts are written, in sums and averages of 16 KiB or more:
    /// "f32" as in the buffers, those of f32 as "bf16" or "f16", or those of f32, f16 and bf16 in 8
    /// bits, as "int8" or "f8e4m3". All ranks use rank 0's value.
    pub wire_dtype: *const c_char,
    /// A folder where the lowest rank of each machine writes a file by which `kolo top` finds the
    /// job. Only its user can open the file, which holds the secret of the job.
    pub top_dir: *const c_char,
    /// Where this rank serves metrics as Prometheus text: "127.0.0.1:9400", whose port is that of
    /// the first rank of a machine, or "unix:/run/kolo-{rank}.sock".
    pub metrics: *const c_char,
    /// The ports at which this process listens, for firewalls, as in "20000-20100". All ranks have the
    /// same range, with one port for every rank of a host and one more for the store, or two for
    /// every rank if the job grows.
    pub ports: *const c_char,
    /// The congestion control of this rank's TCP connections, for what it sends: "auto", "system", or
    /// a name that the system knows, such as "cubic".
    pub congestion_control: *const c_char,
    /// 1: this process joins a job that has started, as a further rank, when the ranks of the job
    /// call kolo_comm_grow. It has no rank and no number of ranks: connect with kolo_comm_init_env.
    /// -1: it does not.
    pub join: i32,
    /// Where this rank's host is in the network: a path such as "rack7" or "pod1/rack7".
    pub topology: *const c_char,
    /// The network interfaces over which links to other hosts are striped, as in "eth0,eth1". A link
    /// goes on if one of them fails.
    pub rails: *const c_char,
    /// The seed with which messages of 8 bits are rounded at random. 0: to the nearest. All ranks use
    /// rank 0's value.
    pub wire_seed: u32,
}
}

// SAFETY: the struct begins with its size; numbers may be zero, and texts null.
unsafe impl Grows for kolo_config_t {
    const NAMES: (&'static str, &'static str) = ("config", "config->size");
    // `trace_signal` was added at the same time, in place of a reserved field that had to be 0.
    const FIRST: usize = std::mem::offset_of!(kolo_config_t, trace_dir);
}

/// A field, as text in the syntax of the variable of its setting.
trait Field {
    /// Returns the value; `None` if the field is not set. The field has this name in errors.
    ///
    /// # Safety
    ///
    /// A text is null or ends with a zero.
    unsafe fn given(self, what: &'static str) -> Result<Option<String>, Fault>;
}

/// A count.
impl Field for u32 {
    unsafe fn given(self, _: &'static str) -> Result<Option<String>, Fault> {
        Ok((self > 0).then(|| self.to_string()))
    }
}

impl Field for usize {
    unsafe fn given(self, _: &'static str) -> Result<Option<String>, Fault> {
        Ok((self > 0).then(|| self.to_string()))
    }
}

/// Milliseconds.
impl Field for u64 {
    unsafe fn given(self, _: &'static str) -> Result<Option<String>, Fault> {
        Ok((self > 0).then(|| format!("{self}ms")))
    }
}

/// What is on or off.
impl Field for i32 {
    unsafe fn given(self, what: &'static str) -> Result<Option<String>, Fault> {
        match self {
            0 => Ok(None),
            1 => Ok(Some("1".to_owned())),
            -1 => Ok(Some("0".to_owned())),
            other => Err(Fault::value(what, other, "it must be 1, -1, or 0 for not set")),
        }
    }
}

impl Field for f64 {
    unsafe fn given(self, _: &'static str) -> Result<Option<String>, Fault> {
        Ok((self != 0.0).then(|| self.to_string()))
    }
}

impl Field for *const c_char {
    unsafe fn given(self, what: &'static str) -> Result<Option<String>, Fault> {
        // SAFETY: passed on.
        Ok(unsafe { text(self, what)? }.map(str::to_owned))
    }
}

/// Returns the options that a configuration stands for.
///
/// # Safety
///
/// `config` is null or points to as many bytes as its first field says; its texts are null or end
/// with a zero.
pub(crate) unsafe fn builder(config: *const kolo_config_t) -> Result<Builder, Fault> {
    let mut builder = Communicator::builder();
    if config.is_null() {
        return Ok(builder);
    }
    // SAFETY: passed on.
    let config = unsafe { sized::read(config)? };
    check_version(&config)?;
    let mut tls: [Option<String>; 3] = [const { None }; 3];
    // SAFETY: passed on.
    for (name, value) in unsafe { config.given()? } {
        builder = match name {
            "size" | "version" | "network_latency_us" | "network_gigabytes_per_s" => builder,
            "job" => builder.job(value),
            "secret" => builder.secret(settings::parse_secret("secret", &value)?),
            "secret_file" => builder.secret_file(value),
            "interfaces" => builder.interface(value),
            "devices" => builder.devices(value == "1"),
            "tls_ca" | "tls_cert" | "tls_key" => {
                tls[["tls_ca", "tls_cert", "tls_key"].iter().position(|file| *file == name).unwrap_or(0)] = Some(value);
                builder
            }
            // The options of the table of settings, by their names there.
            name => builder.set(name.strip_suffix("_ms").unwrap_or(name), &value)?,
        };
    }
    let builder = match tls {
        [None, None, None] => builder,
        [Some(authority), Some(certificate), Some(key)] => builder.tls(authority, certificate, key),
        _ => return Err(Fault::setting("tls_ca", "", "give tls_ca, tls_cert and tls_key, or none of them")),
    };
    network(builder, &config)
}

fn check_version(config: &kolo_config_t) -> Result<(), Fault> {
    if config.version == KOLO_CONFIG_VERSION {
        return Ok(());
    }
    let expected = format!(
        "this kolo knows version {KOLO_CONFIG_VERSION}; set it to KOLO_CONFIG_VERSION, and if the header is newer than the \
         library, install the library that it came with"
    );
    Err(Fault::value("config->version", config.version, expected))
}

/// Sets the costs of the network, for choosing algorithms.
fn network(builder: Builder, config: &kolo_config_t) -> Result<Builder, Fault> {
    match (config.network_latency_us, config.network_gigabytes_per_s) {
        (0.0, 0.0) => Ok(builder),
        (latency, rate) if latency > 0.0 && latency.is_finite() && rate > 0.0 && rate.is_finite() => {
            let mut model = CostModel::default();
            (model.network.latency, model.network.per_byte) = (latency * 1e-6, 1e-9 / rate);
            Ok(builder.cost_model(model.with_uplink(model.network)))
        }
        (latency, rate) => {
            let given = format!("{latency} us, {rate} GB/s");
            Err(Fault::setting("network", given, "give both latency and rate, more than 0, or neither"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the configuration with one field set.
    fn with(set: impl FnOnce(&mut kolo_config_t)) -> Result<Builder, Fault> {
        // SAFETY: zeros are a configuration without settings.
        let mut config: kolo_config_t = unsafe { std::mem::zeroed() };
        (config.size, config.version) = (size_of::<kolo_config_t>(), KOLO_CONFIG_VERSION);
        set(&mut config);
        // SAFETY: the texts of the tests end with a zero.
        unsafe { builder(&raw const config) }
    }

    #[test]
    fn fields_are_read_as_the_variables_of_their_settings() {
        let shown = |builder: Result<Builder, Fault>| format!("{:?}", builder.unwrap());
        let builder = Communicator::builder;
        assert_eq!(
            shown(with(|config| config.copy_mode = c"cma".as_ptr())),
            format!("{:?}", builder().copy_mode(kolo::CopyMode::Cma))
        );
        assert_eq!(shown(with(|config| config.reproducible = -1)), format!("{:?}", builder().reproducible(false)));
        assert_eq!(shown(with(|config| config.sockets = 3)), format!("{:?}", builder().sockets(3)));
        assert_eq!(
            shown(with(|config| config.timeout_ms = 1500)),
            format!("{:?}", builder().timeout(std::time::Duration::from_millis(1500)))
        );
        assert_eq!(shown(with(|config| config.interfaces = c"eth".as_ptr())), format!("{:?}", builder().interface("eth")));
        assert_eq!(shown(with(|config| config.devices = 1)), format!("{:?}", builder().devices(true)));
        let wrong = with(|config| config.copy_mode = c"read".as_ptr()).unwrap_err().to_string();
        assert!(wrong.contains("copy_mode") && wrong.contains("cma"), "{wrong}");
    }
}
