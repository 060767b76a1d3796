import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.HexFormat;
import org.apache.kafka.common.message.TxnOffsetCommitRequestDataJsonConverter;
import org.apache.kafka.common.protocol.ApiKeys;
import org.apache.kafka.common.requests.RequestHeader;
import org.apache.kafka.common.requests.TxnOffsetCommitRequest;

/** Writes consumed offsets as the Java client sends them: for each line of JSON the bytes of the request, in hexadecimal. */
public final class OffsetsRequest {
    public static void main(String[] arguments) throws Exception {
        ObjectMapper json = new ObjectMapper();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            JsonNode one = json.readTree(line);
            short version = one.get("version").shortValue();
            RequestHeader header = new RequestHeader(
                ApiKeys.TXN_OFFSET_COMMIT, version, one.get("client").textValue(), one.get("correlation").intValue());
            ByteBuffer bytes = new TxnOffsetCommitRequest(
                TxnOffsetCommitRequestDataJsonConverter.read(one.get("request"), version), version)
                .serializeWithHeader(header);
            byte[] copy = new byte[bytes.remaining()];
            bytes.get(copy);
            System.out.println("result " + HexFormat.of().formatHex(copy));
        }
    }
}
