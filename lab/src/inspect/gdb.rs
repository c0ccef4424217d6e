//! The gdb stub of a running QEMU: registers of the system and physical memory.
//!
//! The packets are those of the GDB manual, "Remote Serial Protocol", and of QEMU's
//! docs/system/gdb.rst (`Qqemu.PhyMemMode`: addresses are physical). QEMU stops the machine on a
//! connection, and resumes it on a detach. Dropping a [`Stub`] detaches.

use std::io::{self, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use super::registers::Registers;

/// A stub that does not answer for so long is none.
const PATIENCE: Duration = Duration::from_secs(5);
/// QEMU refuses to read more at once: its packets are 4096 characters long.
const AT_ONCE: usize = 2000;

trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

/// A connection.
pub struct Stub {
    keep_stopped: bool,
    stream: BufReader<Box<dyn Stream>>,
}

impl Stub {
    /// Connects to `PORT`, `HOST:PORT` or the path of a socket, and reads physical memory from here
    /// on. Registers are those of `cpu`.
    pub fn connect(address: &str, cpu: u32, keep_stopped: bool) -> io::Result<Self> {
        let mut stub = Self { keep_stopped, stream: BufReader::new(stream(address)?) };
        let supported = stub.ask("qSupported:xmlRegisters=arm,i386,riscv")?;
        if !supported.contains("PacketSize=") {
            return Err(io::Error::other("this does not answer as a gdb stub"));
        }
        if stub.ask("Qqemu.PhyMemMode:1")? != "OK" {
            return Err(io::Error::other(
                "this gdb stub does not read physical memory: it is not QEMU's",
            ));
        }
        // QEMU counts CPUs from 1.
        if stub.ask(&format!("Hg{:x}", u64::from(cpu) + 1))? != "OK" {
            return Err(io::Error::other(format!("there is no CPU {cpu}")));
        }
        Ok(stub)
    }

    /// Sends a packet, and returns the answer.
    fn ask(&mut self, packet: &str) -> io::Result<String> {
        let sum = |bytes: &[u8]| bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
        let packet = format!("${packet}#{:02x}", sum(packet.as_bytes()));
        self.stream.get_mut().write_all(packet.as_bytes())?;
        loop {
            let answer = self.answer()?;
            // That the machine has stopped is said when it has, in front of an answer.
            if !answer.starts_with(['S', 'T']) {
                return Ok(answer);
            }
        }
    }

    fn answer(&mut self) -> io::Result<String> {
        let mut byte = || {
            let mut byte = [0];
            self.stream.read_exact(&mut byte).map(|()| byte[0])
        };
        // Acknowledgements stand before it.
        while byte()? != b'$' {}
        let mut answer = Vec::new();
        loop {
            match byte()? {
                b'#' => break,
                // An escape: the next byte, with bit 5 inverted.
                b'}' => answer.push(byte()? ^ 0x20),
                byte => answer.push(byte),
            }
        }
        let (_, _) = (byte()?, byte()?);
        self.stream.get_mut().write_all(b"+")?;
        String::from_utf8(answer).map_err(io::Error::other)
    }

    /// Reads physical memory.
    pub fn read(&mut self, pa: u64, bytes: &mut [u8]) -> io::Result<()> {
        for (number, part) in bytes.chunks_mut(AT_ONCE).enumerate() {
            let at = pa + (number * AT_ONCE) as u64;
            let hex = self.ask(&format!("m{at:x},{:x}", part.len()))?;
            from_hex(&hex, part)?;
        }
        Ok(())
    }

    /// Reads the registers that say where tables are, of those that the processor has.
    pub fn registers(&mut self) -> io::Result<Registers> {
        let mut registers = Registers::default();
        let (mut number, mut files) = (0, vec!["target.xml".to_owned()]);
        while let Some(file) = files.pop() {
            // Old ones do not say what `xi` is.
            let text = self.file(&file)?.replace("<xi:", "<");
            let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
            let xml = roxmltree::Document::parse_with_options(&text, options);
            let xml = xml.map_err(io::Error::other)?;
            let nodes = |name| xml.descendants().filter(move |node| node.tag_name().name() == name);
            let included = nodes("include").filter_map(|node| node.attribute("href"));
            let included: Vec<String> = included.map(str::to_owned).collect();
            for node in nodes("reg") {
                number = node.attribute("regnum").and_then(|it| it.parse().ok()).unwrap_or(number);
                let name = node.attribute("name").unwrap_or_default();
                if Registers::is_one(name) {
                    let hex = self.ask(&format!("p{number:x}"))?;
                    let mut bytes = [0; 8];
                    let bytes = &mut bytes[..(hex.len() / 2).min(8)];
                    // One that cannot be read in this state is not in use.
                    if !hex.starts_with('E') && from_hex(&hex, bytes).is_ok() {
                        let value =
                            bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
                        registers.set(name, value);
                    }
                }
                number += 1;
            }
            // The next to be read is the first.
            files.extend(included.into_iter().rev());
        }
        Ok(registers)
    }

    /// Reads a file that the stub has.
    fn file(&mut self, name: &str) -> io::Result<String> {
        let mut text = String::new();
        loop {
            let part = self.ask(&format!("qXfer:features:read:{name}:{:x},f00", text.len()))?;
            let (more, part) = (part.starts_with('m'), part.get(1..).unwrap_or_default());
            text.push_str(part);
            if !more || part.is_empty() {
                return Ok(text);
            }
        }
    }
}

impl Drop for Stub {
    fn drop(&mut self) {
        // A peer that does not answer this would not answer a detach.
        let is_there = self.ask("Qqemu.PhyMemMode:0").is_ok();
        if is_there && !self.keep_stopped {
            let _ = self.ask("D");
        }
    }
}

fn stream(address: &str) -> io::Result<Box<dyn Stream>> {
    #[cfg(unix)]
    if address.contains('/') {
        let stream = std::os::unix::net::UnixStream::connect(address)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        return Ok(Box::new(stream));
    }
    let address = match address.contains(':') {
        true => address.to_owned(),
        false => format!("localhost:{address}"),
    };
    let stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    Ok(Box::new(stream))
}

/// Fills `bytes` from two hexadecimal digits each.
fn from_hex(hex: &str, bytes: &mut [u8]) -> io::Result<()> {
    let wrong = || io::Error::other(format!("the stub answers {hex:?}"));
    if hex.len() < 2 * bytes.len() || !hex.is_ascii() {
        return Err(wrong());
    }
    for (byte, digits) in bytes.iter_mut().zip(hex.as_bytes().chunks(2)) {
        let digits = str::from_utf8(digits).map_err(io::Error::other)?;
        *byte = u8::from_str_radix(digits, 16).map_err(|_| wrong())?;
    }
    Ok(())
}
